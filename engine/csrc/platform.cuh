// What differs between the GPU and the host: memory order, the clock, CRC32C, and the team of threads
// that runs the scheduler. On the host, and in the simulator, the team is one thread.
#pragma once
#include <string.h>

#include "layout.h"

// Is the team more than one thread? BB_TEAM_HEADER: a test's own team, of CPU threads.
#if defined(__CUDACC__) || defined(BB_TEAM_HEADER)
#define BB_PARALLEL
#endif

#if defined(__CUDACC__)
#define BB_FN __device__ inline
#else
#define BB_FN inline
#include <time.h>
#endif

#if defined(BB_TEAM_HEADER)
#include BB_TEAM_HEADER
#endif

namespace blinkbed {

// ---- Memory order across the link: system scope, since the other side is a NIC or a CPU -------------
#if defined(__CUDACC__)
BB_FN uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
BB_FN uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
BB_FN void store_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
BB_FN void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
BB_FN uint32_t load_volatile(const uint32_t* p) { return *(const volatile uint32_t*)p; }
#else
BB_FN uint64_t load_acquire(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
BB_FN uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
BB_FN uint32_t load_volatile(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
BB_FN void store_release(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
BB_FN void store_release(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
#endif

// ---- Time, nanoseconds of the device's own clock --------------------------------------------------
#if defined(BB_VIRTUAL_CLOCK)
static uint64_t virtual_now_ns = 1;  // set by who simulates (engine/simulate); 0 means "never"
#endif

BB_FN uint64_t clock_ns() {
#if defined(BB_VIRTUAL_CLOCK)
  return virtual_now_ns;
#elif defined(__CUDACC__)
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
#else
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
#endif
}

// ---- CRC32C (Castagnoli, RFC 3720 appendix B.4) ------------------------------------------------------
// Without an instruction for it: four bits at a time, table of the polynomial's 16 nibble remainders.
BB_FN uint32_t crc32c_nibbles(uint32_t crc, const uint8_t* bytes, size_t n) {
  constexpr uint32_t table[16] = {0x00000000u, 0x105ec76fu, 0x20bd8edeu, 0x30e349b1u,
                                  0x417b1dbcu, 0x5125dad3u, 0x61c69362u, 0x7198540du,
                                  0x82f63b78u, 0x92a8fc17u, 0xa24bb5a6u, 0xb21572c9u,
                                  0xc38d26c4u, 0xd3d3e1abu, 0xe330a81au, 0xf36e6f75u};
  for (size_t i = 0; i < n; i++) {
    crc ^= bytes[i];
    crc = (crc >> 4) ^ table[crc & 15];
    crc = (crc >> 4) ^ table[crc & 15];
  }
  return crc;
}

BB_FN uint32_t crc32c(const void* data, size_t n) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0u;
#if defined(__SSE4_2__) && !defined(__CUDACC__)
  uint64_t wide = crc;
  for (; n >= 8; n -= 8, bytes += 8) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = uint32_t(wide);
  for (; n; n--, bytes++) crc = __builtin_ia32_crc32qi(crc, *bytes);
#else
  crc = crc32c_nibbles(crc, bytes, n);
#endif
  return ~crc;
}

#if defined(__CUDACC__)
// The check of a token entry: CRC32C is linear, so each bit of the seven words adds a constant of its own.
// Straight code without a table in memory, 1 us less for a single thread.
struct EntryChecks {
  uint32_t start = 0, column[7][32] = {};

  static constexpr uint32_t push(uint32_t crc, uint32_t word) {
    crc ^= word;
    for (int bit = 0; bit < 32; bit++) crc = crc & 1 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
    return crc;
  }
  constexpr EntryChecks() {
    start = ~0u;
    for (int k = 0; k < 7; k++) start = push(start, 0);
    for (int bit = 0; bit < 32; bit++) {
      uint32_t crc = push(0, 1u << bit);
      for (int k = 6; k >= 0; k--) {
        column[k][bit] = crc;
        crc = push(crc, 0);
      }
    }
  }
};

BB_FN uint32_t crc32c_of_entry(const uint32_t* words) {
  constexpr EntryChecks checks;
  uint32_t crc = checks.start;
#pragma unroll
  for (int k = 0; k < 7; k++) {
#pragma unroll
    for (int bit = 0; bit < 32; bit++)
      crc ^= (0u - (words[k] >> bit & 1u)) & checks.column[k][bit];
  }
  return ~crc;
}

// a * b modulo the polynomial, bits reversed as in the CRC.
BB_FN uint32_t crc32c_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a; a <<= 1) {
    if (a >> 31) product ^= b;
    b = b & 1 ? (b >> 1) ^ 0x82f63b78u : b >> 1;
  }
  return product;
}

// The CRC's state after `words` further zero words: times x^(32 * words).
BB_FN uint32_t crc32c_skip(uint32_t crc, uint32_t words) {
  constexpr uint32_t powers[18] = {
      0x82f63b78u, 0x6ea2d55cu, 0x18b8ea18u, 0x510ac59au, 0xb82be955u, 0xb8fdb1e7u,
      0x88e56f72u, 0x74c360a4u, 0xe4172b16u, 0x0d65762au, 0x35d73a62u, 0x28461564u,
      0xbf455269u, 0xe2ea32dcu, 0xfe7740e6u, 0xf946610bu, 0x3c204f8fu, 0x538586e3u};
  for (int k = 0; words; words >>= 1, k++)
    if (words & 1) crc = crc32c_multiply(crc, powers[k]);
  return crc;
}
#endif

// ---- The team ----------------------------------------------------------------------------------------
// Every thread of the team calls the same collective with the same trip count. The results do not depend
// on the team's size, so a plan made by 256 GPU threads equals one made by a single CPU thread.
#if !defined(BB_TEAM_HEADER)
struct Team {
  int rank = 0, size = 1;

  BB_FN bool leader() const { return rank == 0; }

#if defined(__CUDACC__)
  BB_FN void sync() const { __syncthreads(); }

  // Exclusive prefix sum of `value` over the team; *total is the sum. At most 1,024 threads.
  BB_FN int scan(int value, int* total) const {
    __shared__ int warp_sums[33];
    const int lane = rank & 31, warp = rank >> 5, warps = (size + 31) >> 5;
    int inclusive = value;
    for (int d = 1; d < 32; d <<= 1) {
      const int other = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    __syncthreads();
    if (lane == 31 || rank == size - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    if (rank == 0) {
      int sum = 0;
      for (int w = 0; w < warps; w++) {
        const int own = warp_sums[w];
        warp_sums[w] = sum;
        sum += own;
      }
      warp_sums[32] = sum;
    }
    __syncthreads();
    *total = warp_sums[32];
    return warp_sums[warp] + inclusive - value;
  }

  // The leader's value, for all.
  template <class T>
  BB_FN T broadcast(T value) const {
    __shared__ uint64_t shared;
    __syncthreads();
    if (rank == 0) shared = uint64_t(value);
    __syncthreads();
    return T(shared);
  }
#else
  BB_FN void sync() const {}
  template <class T>
  BB_FN T broadcast(T value) const {
    return value;
  }
  BB_FN int scan(int value, int* total) const {
    *total = value;
    return 0;
  }
#endif

  BB_FN int sum(int value) const {
    int total;
    scan(value, &total);
    return total;
  }
};
#endif

// A word of the window, for all. Read by the leader alone: every further reader is a trip over the bus.
template <class T>
BB_FN T read_word(const Team& team, const T* word) {
  return team.broadcast(team.leader() ? load_acquire(word) : T(0));
}

// CRC32C of `n` bytes, a multiple of 4, of the team's own memory; valid for the leader.
BB_FN uint32_t team_crc32c(const Team& team, const uint8_t* bytes, size_t n) {
#if defined(__CUDACC__)
  __shared__ uint32_t sum;
  if (team.leader()) sum = 0;
  team.sync();
  const uint32_t words = uint32_t(n / 4), each = (words + team.size - 1) / team.size;
  const uint32_t first = min(each * team.rank, words), end = min(first + each, words);
  if (first < end) {
    const uint32_t part =
        crc32c_nibbles(team.leader() ? ~0u : 0u, bytes + 4 * first, 4 * size_t(end - first));
    atomicXor(&sum, crc32c_skip(part, words - end));
  }
  team.sync();
  return ~sum;
#else
  return team.leader() ? crc32c(bytes, n) : 0;
#endif
}

// Runs body(i, offset) for i in [0, n), offset being the exclusive prefix sum of count(i) so far plus
// `base`; returns base plus the sum of all counts. count is called once per i, before any body of the
// same stride.
template <class Count, class Body>
BB_FN int scan_each(const Team& team, int n, int base, Count count, Body body) {
  for (int first = 0; first < n; first += team.size) {
    const int i = first + team.rank;
    const int value = i < n ? count(i) : 0;
    int total;
    const int offset = base + team.scan(value, &total);
    if (value) body(i, offset);
    base += total;
  }
  team.sync();
  return base;
}

// A draw in [0, 1) from the request's own stream: Philox4x32-10 (Salmon et al., SC 2011), key = seed,
// counter = position. Independent of batch mates, steps, and preemption.
BB_FN float philox_uniform(uint64_t seed, uint32_t position) {
  uint32_t c[4] = {position, 0, 0, 0};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next0 = uint32_t(p1 >> 32) ^ c[1] ^ k0, next2 = uint32_t(p0 >> 32) ^ c[3] ^ k1;
    c[1] = uint32_t(p1);
    c[3] = uint32_t(p0);
    c[0] = next0;
    c[2] = next2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return float(c[0] >> 8) * (1.0f / 16777216.0f);
}

}  // namespace blinkbed
