// Enough of CUDA to run a kernel's block on the CPU: each thread is a fiber, and a fiber gives way at every
// barrier and shuffle. Blocks run one after the other, so __shared__ is static. The order of the fibers
// between two barriers changes from round to round: who forgets a barrier is found out.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Dim {
  unsigned x, y;
};
static Dim threadIdx, blockIdx, blockDim;

namespace fibers {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kMostThreads = 1024, kLanes = 32;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended;
};

struct Barrier {  // for those of a group that have not ended
  int live, arrived;
  unsigned round;

  void look() {
    if (arrived < live || !arrived) return;
    arrived = 0;
    round++;
  }
};

static std::vector<Fiber> all(kMostThreads);
static ucontext_t outside;
static Barrier block, warps[kMostThreads / kLanes];
static uint64_t lanes[kMostThreads / kLanes][kLanes];
static void (*body)(void*);
static void* argument;

inline Barrier& own_warp() { return warps[threadIdx.x / kLanes]; }

inline void wait(Barrier& barrier) {
  const unsigned round = barrier.round, own = threadIdx.x;
  barrier.arrived++;
  barrier.look();
  while (barrier.round == round) {
    swapcontext(&all[own].context, &outside);
    threadIdx.x = own;
  }
}

inline void run_one() {
  body(argument);
  all[threadIdx.x].ended = true;
  for (Barrier* barrier : {&block, &own_warp()}) {
    barrier->live--;
    barrier->look();
  }
}

template <class Kernel>
void run_block(unsigned threads, Kernel& kernel) {
  body = [](void* at) { (*static_cast<Kernel*>(at))(); };
  argument = &kernel;
  block = {int(threads), 0, 0};
  for (unsigned w = 0; w < threads / kLanes; w++) warps[w] = {kLanes, 0, 0};
  for (unsigned t = 0; t < threads; t++) {
    Fiber& fiber = all[t];
    fiber.ended = false;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &outside;
    makecontext(&fiber.context, run_one, 0);
  }
  while (block.live) {
    const unsigned first = unsigned(rand()) % threads;
    for (unsigned k = 0; k < threads; k++) {
      const unsigned t = (first + k) % threads;
      if (all[t].ended) continue;
      threadIdx.x = t;
      swapcontext(&outside, &all[t].context);
    }
  }
}

template <class Kernel>
void launch(Dim grid, unsigned threads, Kernel kernel) {
  blockDim = {threads, 1};
  for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block(threads, kernel);
}

template <class T>
T shuffle(T value, int from) {
  uint64_t* const own = lanes[threadIdx.x / kLanes];
  memcpy(&own[threadIdx.x % kLanes], &value, sizeof value);
  wait(own_warp());
  memcpy(&value, &own[from], sizeof value);
  wait(own_warp());
  return value;
}

}  // namespace fibers

inline void __syncthreads() { fibers::wait(fibers::block); }
inline int __syncthreads_count(int value) {
  static int count;
  __syncthreads();
  count = 0;
  __syncthreads();
  count += value != 0;
  __syncthreads();
  return count;
}
inline int __syncthreads_or(int value) { return __syncthreads_count(value) != 0; }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return fibers::shuffle(value, int(threadIdx.x % fibers::kLanes) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = int(threadIdx.x % fibers::kLanes);
  return fibers::shuffle(value, lane < distance ? lane : lane - distance);
}
inline bool __all_sync(unsigned mask, bool value) {
  for (int d = fibers::kLanes / 2; d; d >>= 1) value = __shfl_xor_sync(mask, value, d) && value;
  return value;
}

template <class T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}
template <class T>
T atomicAdd(T* at, T value) {
  return atomicExch(at, T(*at + value));
}
template <class T>
T atomicOr(T* at, T value) {
  return atomicExch(at, T(*at | value));
}
template <class T>
T atomicXor(T* at, T value) {
  return atomicExch(at, T(*at ^ value));
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(uint32_t(bits)); }
inline float __expf(float x) { return expf(x); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
