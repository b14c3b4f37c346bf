// A team of CPU threads in place of a block of GPU threads. It aborts when two threads meet in different
// collectives (on the GPU: a barrier reached by some threads only), and with the thread sanitizer it
// shows every shared word that one thread changes while another may still read it.
#pragma once
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

namespace blinkbed {

constexpr int kMaxTeam = 64;

struct TeamShared {
  pthread_barrier_t barrier;
  const void* sites[kMaxTeam];
  int values[kMaxTeam];
  uint64_t word;

  explicit TeamShared(int size) { pthread_barrier_init(&barrier, nullptr, unsigned(size)); }
  ~TeamShared() { pthread_barrier_destroy(&barrier); }
};

struct Team {
  int rank = 0, size = 1;
  TeamShared* shared = nullptr;

  bool leader() const { return rank == 0; }

  void meet(const void* site) const {
    if (size == 1) return;
    shared->sites[rank] = site;
    pthread_barrier_wait(&shared->barrier);
    for (int i = 0; i < size; i++)
      if (shared->sites[i] != site) {
        fprintf(stderr, "threads %d and %d are in different collectives: %p, %p\n", rank, i, site,
                shared->sites[i]);
        abort();
      }
    pthread_barrier_wait(&shared->barrier);
  }

  __attribute__((noinline)) void sync() const { meet(__builtin_return_address(0)); }

  __attribute__((noinline)) int scan(int value, int* total) const {
    const void* site = __builtin_return_address(0);
    if (size == 1) return *total = value, 0;
    shared->values[rank] = value;
    meet(site);
    int before = 0, sum = 0;
    for (int i = 0; i < size; i++) {
      if (i == rank) before = sum;
      sum += shared->values[i];
    }
    *total = sum;
    meet(site);
    return before;
  }

  template <class T>
  __attribute__((noinline)) T broadcast(T value) const {
    const void* site = __builtin_return_address(0);
    if (size == 1) return value;
    if (rank == 0) shared->word = uint64_t(value);
    meet(site);
    const T all = T(shared->word);
    meet(site);
    return all;
  }

  int sum(int value) const {
    int total;
    scan(value, &total);
    return total;
  }
};

}  // namespace blinkbed
