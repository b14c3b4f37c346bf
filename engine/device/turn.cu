// One turn of the scheduler per launch, without a launch of its own: for comparing the GPU's plans with
// the host's, and for timing what a turn consists of.
#include "scripted.cuh"
#include "step.cuh"

using namespace blinkbed;

extern "C" __global__ void scheduler_turn(Scheduler* s) {
  const Team team{int(threadIdx.x), int(blockDim.x)};
  scheduler_step(team, *s, *s->plan, s->rows, s->results);
}

// `turns` passes of the scripted model with the turn behind each. phases[turn][i], ns: publish, poll,
// admit, plan, show.
extern "C" __global__ void timed_turns(Scheduler* scheduler, int turns, uint32_t* phases) {
  Scheduler& s = *scheduler;
  const Team team{int(threadIdx.x), int(blockDim.x)};
  for (int turn = 0; turn < turns; turn++) {
    scripted_pass(team, s, *s.plan, s.rows, s.results);
    team.sync();
    uint64_t t[6];
    t[0] = clock_ns();
    const uint32_t command = team.broadcast(load_acquire(&s.command));
    publish(team, s, *s.plan, s.rows, s.results, s.alternatives);
    t[1] = clock_ns();
    poll(team, s, command);
    t[2] = clock_ns();
    admit(team, s);
    t[3] = clock_ns();
    plan_step(team, s, *s.plan, s.rows);
    t[4] = clock_ns();
    if (team.leader()) decide_state(s, command);
    show_progress(team, s, t[4]);
    team.sync();
    t[5] = clock_ns();
    if (team.leader())
      for (int i = 0; i < 5; i++) phases[5 * turn + i] = uint32_t(t[i + 1] - t[i]);
  }
}

// A pass that takes `ns`: stands for a model where only the loop is measured.
extern "C" __global__ void paced_pass(Scheduler* scheduler, uint64_t ns) {
  const Team team{int(threadIdx.x), int(blockDim.x)};
  const uint64_t start = clock_ns();
  scripted_pass(team, *scheduler, *scheduler->plan, scheduler->rows, scheduler->results);
  while (clock_ns() - start < ns) __nanosleep(200);
}
