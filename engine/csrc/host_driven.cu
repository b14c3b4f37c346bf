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
  const int num_rows = scheduler->plan->num_rows;
  for (int i = team.rank; i < num_rows; i += team.size) results[i] = scheduler->results[i];
  if (scheduler->plan->num_with_alternatives) {
    Result* alternatives = results + scheduler->max_running;
    for (int k = team.rank; k < num_rows * kMaxLogprobs; k += team.size)
      if (scheduler->rows[k / kMaxLogprobs].flags & kRowAlternatives)
        alternatives[k] = scheduler->alternatives[k];
  }
  team.sync();
  if (team.leader()) answer[1] = clock_ns();
}
