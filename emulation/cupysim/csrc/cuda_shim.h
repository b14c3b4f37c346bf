// CUDA C++ for the host compiler: included before every kernel source that cupysim builds.
//
// A kernel runs as a plain loop over blocks and threads on one CPU thread, so threads of a launch
// never run at the same time: no shared memory, no barriers between threads, no warp intrinsics.
#pragma once

#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <type_traits>
#include <utility>

#define __CUPYSIM__ 1

#ifdef CUPYSIM_SCAN  // the pass that looks for kernels keeps the marker in its output
#define __global__ __cupysim_global__
#else
#define __global__
#endif
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ \
  _Pragma("GCC error \"__shared__ memory is not supported by cupysim: use global memory\"")

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

#define CUPYSIM_VECTOR(type, name)                                                   \
  struct name##2 { type x, y; };                                                     \
  struct name##4 { type x, y, z, w; };                                               \
  [[maybe_unused]] static inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  [[maybe_unused]] static inline name##4 make_##name##4(type x, type y, type z, type w) {  \
    return {x, y, z, w};                                                             \
  }
CUPYSIM_VECTOR(float, float)
CUPYSIM_VECTOR(int, int)
CUPYSIM_VECTOR(unsigned, uint)
#undef CUPYSIM_VECTOR

// ---- runtime types and device-side graph launch -------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorLaunchPendingCountExceeded = 69,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};
typedef struct CUstream_st* cudaStream_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
#define cudaStreamGraphTailLaunch (reinterpret_cast<cudaStream_t>(0x0100000000000000ull))
#define cudaStreamGraphFireAndForget (reinterpret_cast<cudaStream_t>(0x0200000000000000ull))

namespace cupysim {

struct Runtime {  // the executor's side of the device runtime; same layout in executor.cpp
  int (*graph_launch)(std::uint64_t exec, std::uint64_t mode);
  std::uint64_t (*current_graph)();
};
static const Runtime* runtime = nullptr;

struct Launch {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
static thread_local Launch launch;  // of the kernel that this thread runs

struct Trap : std::exception {
  const char* what() const noexcept override { return "the kernel called __trap()"; }
};

}  // namespace cupysim

#define threadIdx (::cupysim::launch.thread)
#define blockIdx (::cupysim::launch.block)
#define blockDim (::cupysim::launch.block_dim)
#define gridDim (::cupysim::launch.grid_dim)
#define warpSize 32

[[maybe_unused]] static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec,
                                                           cudaStream_t mode) {
  return static_cast<cudaError_t>(::cupysim::runtime->graph_launch(
      reinterpret_cast<std::uint64_t>(exec), reinterpret_cast<std::uint64_t>(mode)));
}
[[maybe_unused]] static inline cudaGraphExec_t cudaGetCurrentGraphExec() {
  return reinterpret_cast<cudaGraphExec_t>(::cupysim::runtime->current_graph());
}

// ---- synchronisation, time ----------------------------------------------------------------

// Exported where a module uses it: the loader then refuses launches with more than one thread
// per block, for which a loop over threads cannot honour a barrier.
extern "C" __attribute__((visibility("default"), noinline)) inline void cupysim_syncthreads() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#define __syncthreads() cupysim_syncthreads()

[[maybe_unused]] static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[maybe_unused]] static inline void __threadfence_block() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
[[maybe_unused]] static inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
[[noreturn]] [[maybe_unused]] static inline void __trap() {
  throw cupysim::Trap();
}
[[maybe_unused]] static inline void __nanosleep(unsigned ns) {
  struct timespec wait = {static_cast<time_t>(ns / 1000000000u),
                          static_cast<long>(ns % 1000000000u)};
  nanosleep(&wait, nullptr);
}
// Nanoseconds of CLOCK_MONOTONIC: what %globaltimer is on a GPU, on the host's own time base.
[[maybe_unused]] static inline unsigned long long cupysim_globaltimer_ns() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull +
         static_cast<unsigned long long>(now.tv_nsec);
}
[[maybe_unused]] static inline long long clock64() {  // one tick is one nanosecond
  return static_cast<long long>(cupysim_globaltimer_ns());
}

// ---- atomics: relaxed, as CUDA's; the scoped variants are the same here --------------------

#define CUPYSIM_ATOMIC(name, type, builtin)                                            \
  [[maybe_unused]] static inline type name(type* address, type value) {                \
    return builtin(address, value, __ATOMIC_RELAXED);                                  \
  }                                                                                    \
  [[maybe_unused]] static inline type name##_system(type* address, type value) {       \
    return builtin(address, value, __ATOMIC_RELAXED);                                  \
  }
#define CUPYSIM_ATOMICS(type)                                                          \
  CUPYSIM_ATOMIC(atomicAdd, type, __atomic_fetch_add)                                  \
  CUPYSIM_ATOMIC(atomicSub, type, __atomic_fetch_sub)                                  \
  CUPYSIM_ATOMIC(atomicAnd, type, __atomic_fetch_and)                                  \
  CUPYSIM_ATOMIC(atomicOr, type, __atomic_fetch_or)                                    \
  CUPYSIM_ATOMIC(atomicXor, type, __atomic_fetch_xor)                                  \
  CUPYSIM_ATOMIC(atomicExch, type, __atomic_exchange_n)                                \
  [[maybe_unused]] static inline type atomicCAS(type* address, type expected, type value) { \
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED,    \
                                __ATOMIC_RELAXED);                                     \
    return expected;                                                                   \
  }                                                                                    \
  [[maybe_unused]] static inline type atomicCAS_system(type* address, type expected,   \
                                                       type value) {                   \
    return atomicCAS(address, expected, value);                                        \
  }
CUPYSIM_ATOMICS(int)
CUPYSIM_ATOMICS(unsigned)
CUPYSIM_ATOMICS(unsigned long long)
#undef CUPYSIM_ATOMICS
#undef CUPYSIM_ATOMIC

namespace cupysim {
template <class T, class Next>
static inline T update(T* address, Next next) {
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  T wanted = next(old);
  while (!__atomic_compare_exchange(address, &old, &wanted, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
    wanted = next(old);
  }
  return old;
}
}  // namespace cupysim

#define CUPYSIM_EXTREMA(type)                                                          \
  [[maybe_unused]] static inline type atomicMax(type* address, type value) {           \
    return ::cupysim::update(address, [&](type old) { return old > value ? old : value; }); \
  }                                                                                    \
  [[maybe_unused]] static inline type atomicMin(type* address, type value) {           \
    return ::cupysim::update(address, [&](type old) { return old < value ? old : value; }); \
  }                                                                                    \
  [[maybe_unused]] static inline type max(type a, type b) { return a > b ? a : b; }    \
  [[maybe_unused]] static inline type min(type a, type b) { return a < b ? a : b; }
CUPYSIM_EXTREMA(int)
CUPYSIM_EXTREMA(unsigned)
CUPYSIM_EXTREMA(long long)
CUPYSIM_EXTREMA(unsigned long long)
#undef CUPYSIM_EXTREMA

#define CUPYSIM_FLOATING(type)                                                         \
  [[maybe_unused]] static inline type atomicAdd(type* address, type value) {           \
    return ::cupysim::update(address, [&](type old) { return old + value; });          \
  }                                                                                    \
  [[maybe_unused]] static inline type max(type a, type b) { return std::fmax(a, b); }  \
  [[maybe_unused]] static inline type min(type a, type b) { return std::fmin(a, b); }
CUPYSIM_FLOATING(float)
CUPYSIM_FLOATING(double)
#undef CUPYSIM_FLOATING

// ---- intrinsics ---------------------------------------------------------------------------

template <class T>
static inline T __ldg(const T* address) {
  return *address;
}
namespace cupysim {
template <class To, class From>
static inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace cupysim
[[maybe_unused]] static inline int __float_as_int(float v) { return cupysim::bits<int>(v); }
[[maybe_unused]] static inline float __int_as_float(int v) { return cupysim::bits<float>(v); }
[[maybe_unused]] static inline unsigned __float_as_uint(float v) {
  return cupysim::bits<unsigned>(v);
}
[[maybe_unused]] static inline float __uint_as_float(unsigned v) {
  return cupysim::bits<float>(v);
}
[[maybe_unused]] static inline int __popc(unsigned v) { return __builtin_popcount(v); }
[[maybe_unused]] static inline int __popcll(unsigned long long v) {
  return __builtin_popcountll(v);
}
[[maybe_unused]] static inline int __ffs(int v) { return __builtin_ffs(v); }
[[maybe_unused]] static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
[[maybe_unused]] static inline int __clz(int v) {
  return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}
[[maybe_unused]] static inline int __clzll(long long v) {
  return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v));
}
[[maybe_unused]] static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
// Macros, since glibc keeps functions of these names to itself.
#define __expf(v) (std::exp(static_cast<float>(v)))
#define __logf(v) (std::log(static_cast<float>(v)))
[[maybe_unused]] static inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }

// ---- entries: one per kernel, appended by the loader as CUPYSIM_KERNEL(name) ---------------

namespace cupysim {

struct KernelEntry {
  void (*run)(void** args, const unsigned* grid, const unsigned* block);
  unsigned num_params;
  const unsigned* sizes;  // bytes of each parameter
  const char* kinds;      // p pointer, f floating, i integer or enum, s structure
};

template <class T>
constexpr char kind_of() {
  return std::is_pointer_v<T>                                ? 'p'
         : std::is_floating_point_v<T>                       ? 'f'
         : (std::is_integral_v<T> || std::is_enum_v<T>) ? 'i'
                                                             : 's';
}

template <auto Kernel>
struct Entry;

template <class... P, void (*Kernel)(P...)>
struct Entry<Kernel> {
  static constexpr unsigned sizes[] = {static_cast<unsigned>(sizeof(P))..., 0};
  static constexpr char kinds[] = {kind_of<P>()..., '\0'};

  template <std::size_t... I>
  static void loop([[maybe_unused]] void** args, const unsigned* grid, const unsigned* block,
                   std::index_sequence<I...>) {
    launch.grid_dim = dim3(grid[0], grid[1], grid[2]);
    launch.block_dim = dim3(block[0], block[1], block[2]);
    for (unsigned bz = 0; bz < grid[2]; ++bz)
      for (unsigned by = 0; by < grid[1]; ++by)
        for (unsigned bx = 0; bx < grid[0]; ++bx)
          for (unsigned tz = 0; tz < block[2]; ++tz)
            for (unsigned ty = 0; ty < block[1]; ++ty)
              for (unsigned tx = 0; tx < block[0]; ++tx) {
                launch.block = {bx, by, bz};
                launch.thread = {tx, ty, tz};
                Kernel(*static_cast<P*>(args[I])...);
              }
  }
  static void run(void** args, const unsigned* grid, const unsigned* block) {
    loop(args, grid, block, std::index_sequence_for<P...>{});
  }
  static constexpr KernelEntry value = {&run, sizeof...(P), sizes, kinds};
};

}  // namespace cupysim

#define CUPYSIM_KERNEL(name)                                                        \
  extern "C" __attribute__((visibility("default"))) const ::cupysim::KernelEntry*   \
      cupysim_entry_##name() {                                                      \
    return &::cupysim::Entry<&name>::value;                                         \
  }

// Appended once per module: how the loader hands over the executor's side of the runtime.
#define CUPYSIM_MODULE()                                                            \
  extern "C" __attribute__((visibility("default"))) void cupysim_bind(              \
      const ::cupysim::Runtime* bound) {                                            \
    ::cupysim::runtime = bound;                                                     \
  }
