// Pressure on the CPUs that the calling process may run on, until a time is up. Each function returns how
// much work it did, so that a test can prove that it worked.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

uint64_t next_random(uint64_t& x) {
  x ^= x << 13;
  x ^= x >> 7;
  return x ^= x << 17;
}

constexpr size_t kLine = 64;

struct Echo {
  int from, to;
};

void* echo(void* argument) {
  const Echo* ends = static_cast<Echo*>(argument);
  char byte;
  while (read(ends->from, &byte, 1) == 1)
    if (write(ends->to, &byte, 1) != 1) break;
  return nullptr;
}

}  // namespace

extern "C" {

// Arithmetic alone.
uint64_t burn_cpu(uint64_t duration_ns) {
  const uint64_t end = now_ns() + duration_ns;
  uint64_t rounds = 0, x = 88172645463325252u;
  volatile uint64_t keep = 0;
  for (; now_ns() < end; rounds++)
    for (int i = 0; i < 20000; i++) keep = next_random(x);
  (void)keep;
  return rounds;
}

// Reads and writes lines at random within `num_bytes`, about the size of the last-level cache.
uint64_t burn_cache(uint64_t duration_ns, uint64_t num_bytes) {
  const uint64_t end = now_ns() + duration_ns;
  std::vector<uint8_t> memory(num_bytes, 1);
  const size_t lines = num_bytes / kLine;
  uint64_t rounds = 0, x = 88172645463325252u;
  for (; now_ns() < end; rounds++)
    for (int i = 0; i < 4000; i++) memory[next_random(x) % lines * kLine]++;
  return rounds;
}

// Copies from one end of `num_bytes` to the other, in order: far more than any cache holds.
uint64_t burn_memory(uint64_t duration_ns, uint64_t num_bytes) {
  const uint64_t end = now_ns() + duration_ns;
  const size_t half = num_bytes / 2, chunk = 1 << 20;
  std::vector<uint8_t> memory(num_bytes, 1);
  uint64_t rounds = 0;
  for (size_t at = 0; now_ns() < end; rounds++) {
    memcpy(memory.data() + at, memory.data() + half + at, chunk);
    at = at + 2 * chunk <= half ? at + chunk : 0;
  }
  return rounds;
}

// Two threads wake each other through pipes: a context switch for each byte.
uint64_t burn_switch(uint64_t duration_ns) {
  const uint64_t end = now_ns() + duration_ns;
  int there[2], back[2];
  if (pipe(there) != 0 || pipe(back) != 0) return 0;
  Echo ends{there[0], back[1]};
  pthread_t thread;
  if (pthread_create(&thread, nullptr, echo, &ends) != 0) return 0;
  uint64_t rounds = 0;
  char byte = 1;
  for (; now_ns() < end; rounds++)
    if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1) break;
  close(there[1]);
  pthread_join(thread, nullptr);
  close(there[0]);
  close(back[0]);
  close(back[1]);
  return rounds;
}
}
