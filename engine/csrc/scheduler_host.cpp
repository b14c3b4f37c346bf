// The scheduler compiled for the host: property tests and host-driven control paths call it directly.
#include "scripted.cuh"
#include "step.cuh"

using namespace blinkbed;

extern "C" void bb_scheduler_step(Scheduler* s) {
  scheduler_step(Team{}, *s, *s->plan, s->rows, s->results);
}

extern "C" int bb_anything_new(Scheduler* s) { return anything_new(*s); }

extern "C" void bb_scripted_pass(Scheduler* s) {
  scripted_pass(Team{}, *s, *s->plan, s->rows, s->results);
}

extern "C" float bb_philox_uniform(uint64_t seed, uint32_t position) {
  return philox_uniform(seed, position);
}
