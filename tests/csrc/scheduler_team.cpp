// One turn of the scheduler by a team of threads (team_threads.h), under the usual name.
#include <thread>
#include <vector>

#include "step.cuh"

using namespace blinkbed;

extern "C" void bb_scheduler_step(Scheduler* s) {
  constexpr int size = 3;
  TeamShared shared(size);
  auto turn = [&](int rank) {
    scheduler_step(Team{rank, size, &shared}, *s, *s->plan, s->rows, s->results);
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size; rank++) threads.emplace_back(turn, rank);
  turn(0);
  for (std::thread& thread : threads) thread.join();
}
