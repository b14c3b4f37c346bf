// Kernels around the pass on the host-driven paths: the packet is applied before it, the answer made
// after it.
#include "packet.cuh"

using namespace blinkbed;

extern "C" __global__ void open_pass(Scheduler* scheduler, const uint8_t* packet, uint64_t* answer) {
  const Team team{int(threadIdx.x), int(blockDim.x)};
  if (team.leader()) answer[0] = clock_ns();
  apply_packet(team, *scheduler, packet);
}

extern "C" __global__ void close_pass(Scheduler* scheduler, uint64_t* answer) {
  const Team team{int(threadIdx.x), int(blockDim.x)};
  Result* results = reinterpret_cast<Result*>(answer + 2);
  for (int i = team.rank; i < scheduler->plan->num_rows; i += team.size)
    results[i] = scheduler->results[i];
  team.sync();
  if (team.leader()) answer[1] = clock_ns();
}
