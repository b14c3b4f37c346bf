// Kernels of the persistent path: the last node of every step graph, and the scripted model's pass.
#include "paced.cuh"
#include "step.cuh"

using namespace blinkbed;

namespace {

constexpr uint64_t kIdleNodeNs = 2000000;  // an idle node gives way this often

// How long to sleep between two looks at the doorbells, by how long nothing has come. The first 10 ms are
// spent looking all the time, as a GPU would do for ever: a CPU's sleep alone takes tens of microseconds.
__device__ unsigned idle_sleep_ns(uint64_t idle_for_ns) {
  if (idle_for_ns < 10000000) return 0;
  return idle_for_ns < 5000000000ull ? 10000 : 50000;
}

constexpr unsigned kStalledSleepNs = 10000;  // work there, but the token rings are full

__device__ bool is_anything_new(const Team& team, Scheduler& s) {
  return team.broadcast(int(team.leader() && anything_new(s)));
}

#if defined(__CUDACC__)
// The state is worked on in shared memory, where a load takes 20 ns and not 300. Only what changes is
// written back: the command word is the host's.
constexpr int kStateWords = sizeof(Scheduler) / 8, kFirstChanging = offsetof(Scheduler, state) / 8;
static_assert(sizeof(Scheduler) % 8 == 0 && offsetof(Scheduler, state) % 8 == 0, "copied by words");

__device__ void copy_state(const Team& team, uint64_t* to, const uint64_t* from, int first) {
  team.sync();
  for (int i = first + team.rank; i < kStateWords; i += team.size) to[i] = from[i];
  team.sync();
}
#endif

__device__ void wait_for_work(const Team& team, Scheduler& s) {
  if (is_anything_new(team, s)) return __nanosleep(kStalledSleepNs);
  const uint64_t started = team.broadcast(clock_ns());
  while (true) {
    const uint64_t now = team.broadcast(clock_ns());
    if (is_anything_new(team, s) || now - started > kIdleNodeNs) return;
    // By broadcast: show_progress changes shown_ns, and all must enter it or none.
    if (team.broadcast(int(now - s.shown_ns > kShowEveryNs))) show_progress(team, s, now);
    const unsigned sleep_ns = idle_sleep_ns(now - s.busy_ns);
    if (sleep_ns) __nanosleep(sleep_ns);
  }
}

}  // namespace

// Launched with one block. Publishes the pass before it, plans the next one, and tail-launches its graph:
// the loop needs nobody else. With nothing to do it looks at the doorbells for a while, then launches the
// graph that consists of this node alone.
extern "C" __global__ void scheduler_node(Scheduler* scheduler) {
  const Team team{int(threadIdx.x), int(blockDim.x)};
#if defined(__CUDACC__)
  __shared__ uint64_t words[kStateWords];
  uint64_t* const memory = reinterpret_cast<uint64_t*>(scheduler);
  Scheduler& s = *reinterpret_cast<Scheduler*>(words);
  copy_state(team, words, memory, 0);
#else
  Scheduler& s = *scheduler;
#endif
  scheduler_step(team, s, *s.plan, s.rows, s.results);
  if (!s.plan->num_rows && !has_halted(s)) {
    wait_for_work(team, s);
    if (is_anything_new(team, s)) scheduler_step(team, s, *s.plan, s.rows, s.results);
  }
  if (team.leader() && !has_halted(s)) {
    const cudaGraphExec_t next = (cudaGraphExec_t)s.graphs[s.plan->graph];
    if (cudaGraphLaunch(next, cudaStreamGraphTailLaunch) != cudaSuccess) {
      s.error = SchedulerError_GRAPH_LAUNCH;
      s.state = EngineState_FATAL;
    }
  }
#if defined(__CUDACC__)
  copy_state(team, memory, words, kFirstChanging);
#endif
}

#if !defined(__CUDACC__)
extern "C" __global__ void paced_forward(Scheduler* scheduler, const Pace* pace) {
  const uint64_t started = clock_ns();
  if (!scheduler->plan->num_rows) return;
  const uint64_t length_ns = pace_of(*pace, *scheduler->plan, scheduler->rows);
  scripted_pass(Team{}, *scheduler, *scheduler->plan, scheduler->rows, scheduler->results);
  keep_pace(*scheduler, started, length_ns);
}
#endif

extern "C" __global__ void scripted_forward(Scheduler* scheduler) {
  const Team team{int(threadIdx.x), int(blockDim.x)};
  scripted_pass(team, *scheduler, *scheduler->plan, scheduler->rows, scheduler->results);
}
