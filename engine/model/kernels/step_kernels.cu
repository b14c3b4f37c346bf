// What surrounds the forward pass on the GPU: the step's tokens from the scheduler's tables before it,
// and sampling after it. Every length comes from memory; grids are sized for the graph's bucket.
#include "ring.cuh"

using namespace blinkbed;

namespace {

constexpr int kThreads = 1024;

__device__ int block_scan(int value, int* total) {
  return Team{int(threadIdx.x), int(blockDim.x)}.scan(value, total);
}

}  // namespace

// One block of 128 threads per token of the bucket, and one more that lists the work.
//   x[t]            the token's embedding (dimension `hidden`, 16-byte multiples of bf16)
//   positions[t]    its place in the sequence
//   kv_slots[t]     page * page_size + offset of its KV; -1 behind the step's last token
//   last_tokens[r]  of row r, 0 behind the last row
//   squares[t]      the sum of squares of x[t], for at most `skinny` tokens
//   work            number of items, then (row, first token within it) of prefill chunks
extern "C" __global__ void prepare_step(const Scheduler* s, const uint4* embedding, uint4* x,
                                        int32_t* positions, int32_t* kv_slots, int32_t* last_tokens,
                                        int32_t* work, float* squares, int hidden, int bucket,
                                        int num_rows_padded, int chunk, int skinny) {
  const int num_rows = s->plan->num_rows;
  const Row* rows = s->rows;
  if (int(blockIdx.x) == bucket) {
    int items = 0;
    for (int first = 0; first < num_rows_padded; first += blockDim.x) {
      const int r = first + threadIdx.x;
      const bool used = r < num_rows;
      const int n = used ? rows[r].num_tokens : 0;
      const int own = n > 1 ? (n + chunk - 1) / chunk : 0;
      int total;
      const int at = items + block_scan(own, &total);
      for (int k = 0; k < own; k++) {
        work[1 + 2 * (at + k)] = r;
        work[2 + 2 * (at + k)] = k * chunk;
      }
      if (r < num_rows_padded) last_tokens[r] = used ? rows[r].query_start + n - 1 : 0;
      items += total;
      __syncthreads();
    }
    if (threadIdx.x == 0) work[0] = items;
    return;
  }
  __shared__ int found, token;
  const int t = blockIdx.x;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int r = threadIdx.x; r < num_rows; r += blockDim.x)
    if (t >= rows[r].query_start && t < rows[r].query_start + rows[r].num_tokens) found = r;
  __syncthreads();
  if (threadIdx.x == 0) {
    int position = 0, slot = -1, id = 0;
    if (found >= 0) {
      const Row& row = rows[found];
      position = row.first_position + t - row.query_start;
      id = s->history[size_t(s->max_context) * row.seq + position];
      id = id < 0 ? 0 : id >= s->vocab_size ? s->vocab_size - 1 : id;
      const int page =
          s->block_tables[size_t(s->max_pages_per_seq) * row.seq + (position >> s->page_bits)];
      slot = page * s->page_size + (position & (s->page_size - 1));
    }
    positions[t] = position;
    kv_slots[t] = slot;
    token = id;
  }
  __syncthreads();
  const int vectors = hidden / 8;
  const bool used = found >= 0;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const uint4 value = used ? embedding[size_t(vectors) * token + i] : make_uint4(0, 0, 0, 0);
    x[size_t(vectors) * t + i] = value;
    for (const uint32_t pair : {value.x, value.y, value.z, value.w}) {
      const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
      sum += low * low + high * high;
    }
  }
  if (t >= skinny) return;
  __shared__ float sums[4];
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) squares[t] = sums[0] + sums[1] + sums[2] + sums[3];
}

// ---- Sampling ----------------------------------------------------------------------------------------
// The order of engine/model/sampling.py: biases, penalties, suppressed ids, temperature, min_p, top_k,
// top_p, then the inverse CDF in descending order at the row's own uniform number. Nothing is sorted: probabilities are binned
// by their logit's distance from the largest (22 bits up to a weight of 2^-32), once by the upper 11
// bits and then, within the bin that a cut falls into, by the lower 11. Sums are integers, so they do not
// depend on the order of addition. Tokens in one fine bin, 5e-6 apart, count as equals, lowest id first.
namespace {

constexpr int kBins = 2048, kMaxTies = 1024;
constexpr float kRange = 22.18f;  // -log(2^-32)
constexpr float kUnit = 2147483648.0f;

struct Shared {
  uint32_t low[kBins], high[kBins], count[kBins];
  uint64_t warp_mass[33];
  uint32_t warp_count[33];
  float reduce[33], reduce2[33];
  int reduce_id[33];
  uint64_t mass_before, mass_here;
  uint32_t count_before, count_here;
  int bin, num_ties, token, flag;
  int ties[kMaxTies];
};

struct Cut {  // where a cumulative sum in descending order reaches its target
  int key;
  uint64_t mass_before, mass_here;
  uint32_t count_before, count_here;
};

struct Sampler {
  Shared& sh;
  float* logits;
  int vocab;
  float largest, inverse_temperature, min_p;

  __device__ float weight(float score) const {
    const float w = __expf((score - largest) * inverse_temperature);
    return w >= min_p ? w : 0.0f;
  }
  __device__ int key(float score) const {
    const float distance = (largest - score) * inverse_temperature * (4194304.0f / kRange);
    return distance >= 4194303.0f ? -1 : int(distance);
  }

  // Histogram of the upper bits (level 0), or of the lower bits within `coarse` (level 1).
  __device__ void histogram(int level, int coarse) {
    for (int b = threadIdx.x; b < kBins; b += kThreads) sh.low[b] = sh.high[b] = sh.count[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const float score = logits[i];
      const int k = key(score);
      const float w = weight(score);
      if (k < 0 || w <= 0.0f || (level && k >> 11 != coarse)) continue;
      const int b = level ? k & (kBins - 1) : k >> 11;
      const uint32_t units = uint32_t(w * kUnit);
      const uint32_t before = atomicAdd(&sh.low[b], units);
      if (before + units < before) atomicAdd(&sh.high[b], 1u);
      atomicAdd(&sh.count[b], 1u);
    }
    __syncthreads();
  }

  // The first bin at which count (or mass) reaches `target`, given what lies before the histogram.
  // Everything, if the target is beyond the end: the last bin that holds something.
  __device__ void find(uint64_t target, bool by_count, uint64_t mass_before, uint32_t count_before) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, b = 2 * threadIdx.x;
    const uint64_t m0 = uint64_t(sh.high[b]) << 32 | sh.low[b];
    const uint64_t m1 = uint64_t(sh.high[b + 1]) << 32 | sh.low[b + 1];
    const uint32_t c0 = sh.count[b], c1 = sh.count[b + 1];
    uint64_t mass = m0 + m1;
    uint32_t count = c0 + c1;
    for (int d = 1; d < 32; d <<= 1) {
      const uint64_t other_mass = __shfl_up_sync(~0u, mass, d);
      const uint32_t other_count = __shfl_up_sync(~0u, count, d);
      if (lane >= d) mass += other_mass, count += other_count;
    }
    if (lane == 31) sh.warp_mass[warp] = mass, sh.warp_count[warp] = count;
    if (threadIdx.x == 0) sh.bin = -1;
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t sum = mass_before;
      uint32_t number = count_before;
      for (int w = 0; w < kThreads / 32; w++) {
        const uint64_t own = sh.warp_mass[w];
        const uint32_t own_count = sh.warp_count[w];
        sh.warp_mass[w] = sum, sh.warp_count[w] = number;
        sum += own, number += own_count;
      }
      sh.warp_mass[32] = sum, sh.warp_count[32] = number;
    }
    __syncthreads();
    const uint64_t end = by_count ? sh.warp_count[32] : sh.warp_mass[32];
    if (target > end) target = end;
    if (target == 0) target = 1;
    uint64_t from_mass = sh.warp_mass[warp] + mass - m0 - m1;
    uint32_t from_count = sh.warp_count[warp] + count - c0 - c1;
    for (int j = 0; j < 2; j++) {
      const uint64_t own_mass = j ? m1 : m0;
      const uint32_t own_count = j ? c1 : c0;
      const uint64_t from = by_count ? from_count : from_mass;
      const uint64_t own = by_count ? own_count : own_mass;
      if (own && from < target && from + own >= target) {
        sh.bin = b + j;
        sh.mass_before = from_mass, sh.mass_here = own_mass;
        sh.count_before = from_count, sh.count_here = own_count;
      }
      from_mass += own_mass, from_count += own_count;
    }
    __syncthreads();
  }

  // Coarse, then fine. On entry and exit the coarse histogram is not kept: it is made again.
  __device__ Cut cut(uint64_t target, bool by_count, bool coarse_is_there) {
    if (!coarse_is_there) histogram(0, 0);
    find(target, by_count, 0, 0);
    const int coarse = sh.bin;
    const uint64_t mass_before = sh.mass_before;
    const uint32_t count_before = sh.count_before;
    __syncthreads();
    histogram(1, coarse);
    find(target, by_count, mass_before, count_before);
    const Cut result{coarse << 11 | sh.bin, sh.mass_before, sh.mass_here, sh.count_before,
                     sh.count_here};
    __syncthreads();
    return result;
  }

  // The j-th lowest id among the tokens with this key.
  __device__ int tie(int wanted_key, uint32_t j) {
    if (threadIdx.x == 0) sh.num_ties = 0, sh.token = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const float score = logits[i];
      if (key(score) != wanted_key || weight(score) <= 0.0f) continue;
      const int at = atomicAdd(&sh.num_ties, 1);
      if (at < kMaxTies) sh.ties[at] = i;
    }
    __syncthreads();
    const int n = sh.num_ties;
    if (n <= kMaxTies) {
      if (int(threadIdx.x) < n) {
        uint32_t rank = 0;
        for (int i = 0; i < n; i++) rank += sh.ties[i] < sh.ties[threadIdx.x];
        if (rank == min(j, uint32_t(n - 1))) sh.token = sh.ties[threadIdx.x];
      }
    } else {  // a flat distribution: count stretch by stretch
      uint32_t before = 0;
      for (int first = 0; first < vocab; first += kThreads) {
        const int i = first + threadIdx.x;
        const bool is_tie = i < vocab && key(logits[i]) == wanted_key && weight(logits[i]) > 0.0f;
        const int total = __syncthreads_count(is_tie);
        if (j < before + total) {
          int ignored;
          const int rank = block_scan(is_tie ? 1 : 0, &ignored);
          if (is_tie && before + rank == j) sh.token = i;
          break;
        }
        before += total;
      }
    }
    __syncthreads();
    return sh.token;
  }

  __device__ uint64_t total_mass() {
    histogram(0, 0);
    uint64_t mass = 0;
    for (int b = threadIdx.x; b < kBins; b += kThreads)
      mass += uint64_t(sh.high[b]) << 32 | sh.low[b];
    for (int d = 16; d; d >>= 1) mass += __shfl_xor_sync(~0u, mass, d);
    if ((threadIdx.x & 31) == 0) sh.warp_mass[threadIdx.x >> 5] = mass;
    __syncthreads();
    uint64_t sum = 0;
    for (int w = 0; w < kThreads / 32; w++) sum += sh.warp_mass[w];
    __syncthreads();
    return sum;
  }

  __device__ int draw(const Row& row) {
    uint64_t nucleus = total_mass();  // leaves the coarse histogram behind
    bool coarse_is_there = true;
    if (row.top_k > 0 && row.top_k < vocab) {
      const Cut c = cut(uint64_t(row.top_k), true, coarse_is_there);
      coarse_is_there = false;
      const uint32_t taken = min(uint32_t(row.top_k) - min(c.count_before, uint32_t(row.top_k)),
                                 c.count_here);
      nucleus = c.mass_before + uint64_t(double(c.mass_here) * taken / c.count_here);
    }
    if (row.top_p > 0.0f && row.top_p < 1.0f) {
      const uint64_t target = uint64_t(ceil(double(row.top_p) * double(nucleus)));
      const Cut c = cut(target, false, coarse_is_there);
      coarse_is_there = false;
      const double each = double(c.mass_here) / c.count_here;
      const double taken = ceil((double(target) - double(c.mass_before)) / each);
      const uint64_t kept =
          c.mass_before + uint64_t(each * fmin(fmax(taken, 1.0), double(c.count_here)));
      nucleus = min(nucleus, kept);
    }
    const uint64_t target = uint64_t(double(row.uniform) * double(nucleus)) + 1;
    const Cut c = cut(target, false, coarse_is_there);
    const double each = double(c.mass_here) / c.count_here;
    const double offset = floor((double(target) - 1 - double(c.mass_before)) / each);
    return tie(c.key, uint32_t(fmin(fmax(offset, 0.0), double(c.count_here - 1))));
  }
};

struct Peak {
  float largest, sum;  // sum of exp(x - largest)
  int id;              // the lowest with the largest
  bool is_sound;       // no NaN, and finite
};

__device__ void merge(float& m, float& s, int& id, float m2, float s2, int id2) {
  if (m2 > m || (m2 == m && id2 < id)) id = id2;
  const float top = fmaxf(m, m2);
  if (top > -INFINITY) s = s * __expf(m - top) + s2 * __expf(m2 - top);
  m = top;
}

// Of logits[begin, end), by `threads` threads.
__device__ Peak find_peak(Shared& sh, const float* logits, int begin, int end, int threads) {
  float m = -INFINITY, s = 0.0f;
  int id = 0x7fffffff, bad = 0;
  constexpr int kUnroll = 8;
  for (int first = begin + threadIdx.x; first < end; first += threads * kUnroll) {
    float x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      const int i = first + j * threads;
      x[j] = i < end ? logits[i] : -INFINITY;
    }
    float top = m;
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      bad |= x[j] != x[j] || x[j] == INFINITY;
      if (x[j] > top) top = x[j], id = first + j * threads;
    }
    if (top > -INFINITY) {
      s *= __expf(m - top);
#pragma unroll
      for (int j = 0; j < kUnroll; j++) s += __expf(x[j] - top);
    }
    m = top;
  }
  for (int d = 16; d; d >>= 1) {
    const float m2 = __shfl_xor_sync(~0u, m, d), s2 = __shfl_xor_sync(~0u, s, d);
    const int id2 = __shfl_xor_sync(~0u, id, d);
    merge(m, s, id, m2, s2, id2);
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool any_bad = __syncthreads_or(bad);
  if (lane == 0) sh.reduce[warp] = m, sh.reduce2[warp] = s, sh.reduce_id[warp] = id;
  __syncthreads();
  const bool used = lane < threads / 32;
  m = used ? sh.reduce[lane] : -INFINITY, s = used ? sh.reduce2[lane] : 0.0f;
  id = used ? sh.reduce_id[lane] : 0x7fffffff;
  for (int d = 16; d; d >>= 1) {
    const float m2 = __shfl_xor_sync(~0u, m, d), s2 = __shfl_xor_sync(~0u, s, d);
    const int id2 = __shfl_xor_sync(~0u, id, d);
    merge(m, s, id, m2, s2, id2);
  }
  __syncthreads();
  return {m, s, id, !any_bad && m > -INFINITY};
}

constexpr int kPeakParts = 16, kPeakThreads = 256;

// The peak of a row from those of its parts; every warp does the same.
__device__ Peak merge_parts(const Peak* parts) {
  const int lane = threadIdx.x & 31;
  Peak own{-INFINITY, 0.0f, 0x7fffffff, true};
  if (lane < kPeakParts) own = parts[lane];
  const bool is_sound = __all_sync(~0u, own.is_sound);
  for (int d = 16; d; d >>= 1) {
    const float m2 = __shfl_xor_sync(~0u, own.largest, d), s2 = __shfl_xor_sync(~0u, own.sum, d);
    const int id2 = __shfl_xor_sync(~0u, own.id, d);
    merge(own.largest, own.sum, own.id, m2, s2, id2);
  }
  own.is_sound = is_sound;
  return own;
}

__device__ int clamp_id(int id, int vocab) { return id < 0 ? 0 : id >= vocab ? vocab - 1 : id; }

// Logits in the order of their values as integers, then the lower id first: no two are equal.
__device__ uint64_t order_of(float logit, int id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 equals 0
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(ascending) << 32 | uint32_t(~id);
}

// The first in that order, of those behind `last` and of every kThreads-th logit from this thread's on.
__device__ uint64_t own_best(const float* logits, int vocab, uint64_t last) {
  uint64_t best = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const uint64_t order = order_of(logits[i], i);
    if (order < last && order > best) best = order;
  }
  return best;
}

__device__ uint64_t block_max(Shared& sh, uint64_t value) {
  for (int d = 16; d; d >>= 1) value = max(value, uint64_t(__shfl_xor_sync(~0u, value, d)));
  if ((threadIdx.x & 31) == 0) sh.warp_mass[threadIdx.x >> 5] = value;
  __syncthreads();
  value = sh.warp_mass[threadIdx.x & 31];
  for (int d = 16; d; d >>= 1) value = max(value, uint64_t(__shfl_xor_sync(~0u, value, d)));
  __syncthreads();
  return value;
}

// The `count` likeliest tokens, one after the other: who gave the last one looks for its next.
__device__ void find_likeliest(Shared& sh, const float* logits, int vocab, const Peak& peak, int count,
                               Result* alternatives) {
  uint64_t own = own_best(logits, vocab, ~0ull);
  for (int k = 0; k < count; k++) {
    const uint64_t best = block_max(sh, own);
    const int id = best ? int(~uint32_t(best)) : -1;
    if (threadIdx.x == 0) {
      alternatives[k].token = id;
      if (best) alternatives[k].logprob = logits[id] - peak.largest - logf(peak.sum);
    }
    if (!best) return;
    if (own == best && k + 1 < count) own = own_best(logits, vocab, best);
  }
}

constexpr float kLargest = 3.402823466e38f;  // infinity would have no distribution
constexpr uint32_t kKnown = 1u << 31, kBiased = 1u << 30;  // in `seen`; below them how often generated

// Adds the request's biases, the last one of an id that has several. The old values go to `raw`, and
// `seen` says so.
__device__ void add_biases(const Scheduler& s, int seq, int num_biases, float* logits, float* raw,
                           uint32_t* seen) {
  const uint32_t* pairs = bias_of(s, seq);
  const int i = int(threadIdx.x);
  bool counts = i < num_biases;
  for (int j = i + 1; counts && j < num_biases; j++) counts = pairs[2 * j] != pairs[2 * i];
  if (counts) {
    const uint32_t id = pairs[2 * i];
    raw[id] = logits[id];
    logits[id] = fminf(logits[id] + __uint_as_float(pairs[2 * i + 1]), kLargest);
    seen[id] = kBiased;
  }
  __syncthreads();
}
static_assert(kMaxLogitBias <= kThreads && kMaxStopTokenIds <= kThreads, "a thread for each");

__device__ bool is_biased(const Scheduler& s, int seq, int num_biases, int token) {
  const int i = int(threadIdx.x);
  return __syncthreads_or(i < num_biases && int(bias_of(s, seq)[2 * i]) == token);
}

// Changes the logits of known ids in place; the old value of each goes to `raw`, unless it is there.
// Known ids are zero in `seen` afterwards.
__device__ void penalize(const Scheduler& s, const Row& row, float* logits, float* raw,
                         uint32_t* seen) {
  const int32_t* history = s.history + size_t(s.max_context) * row.seq;
  const int end = row.first_position + row.num_tokens;
  for (int i = threadIdx.x; i < end; i += kThreads) {
    const int id = clamp_id(history[i], s.vocab_size);
    atomicOr(&seen[id], kKnown);
    if (i >= row.num_prompt_tokens) atomicAdd(&seen[id], 1u);
  }
  __syncthreads();
  const float repetition = row.repetition_penalty;
  for (int i = threadIdx.x; i < end; i += kThreads) {
    const int id = clamp_id(history[i], s.vocab_size);
    const uint32_t state = atomicExch(&seen[id], 0u);
    if (!state) continue;  // another position of the same id was first
    float value = logits[id];
    if (!(state & kBiased)) raw[id] = value;
    if (repetition > 0.0f && repetition != 1.0f)
      value = value > 0.0f ? value / repetition : value * repetition;
    const uint32_t count = state & (kBiased - 1);
    if (count) value -= row.frequency_penalty * float(count) + row.presence_penalty;
    logits[id] = fminf(value, kLargest);
  }
  __syncthreads();
}

__device__ void clear_seen(const Scheduler& s, int seq, int num_biases, uint32_t* seen) {
  const int i = int(threadIdx.x);
  if (i < num_biases) seen[bias_of(s, seq)[2 * i]] = 0;
}

// Neither EOS nor the request's own stop ids.
__device__ void suppress_stops(const Scheduler& s, const Row& row, float* logits) {
  const int i = int(threadIdx.x);
  if (i < s.num_eos) logits[s.eos[i]] = -INFINITY;
  if (row.num_adjusted && i < int(record_of(s, row.seq).num_stop_token_ids))
    logits[stop_ids_of(s, row.seq)[i]] = -INFINITY;
  __syncthreads();
}

__device__ bool is_known(const Scheduler& s, const Row& row, int token) {
  const int32_t* history = s.history + size_t(s.max_context) * row.seq;
  const int end = row.first_position + row.num_tokens;
  bool found = false;
  for (int i = threadIdx.x; i < end; i += kThreads)
    found |= clamp_id(history[i], s.vocab_size) == token;
  return __syncthreads_or(found);
}

}  // namespace

// The peak of a sixteenth of a row per block of 256 threads; grid [rows][16].
extern "C" __global__ void __launch_bounds__(kPeakThreads) peak_step(const Scheduler* scheduler,
                                                                      const float* logits,
                                                                      Peak* peaks) {
  __shared__ Shared sh;
  const Scheduler& s = *scheduler;
  const int r = blockIdx.x, part = blockIdx.y;
  if (r >= s.plan->num_rows || !(s.rows[r].flags & kRowSample)) return;
  const int each = (s.vocab_size + kPeakParts - 1) / kPeakParts;
  const int begin = each * part, end = min(begin + each, s.vocab_size);
  Peak peak = find_peak(sh, logits + size_t(r) * s.vocab_size, begin, end, kPeakThreads);
  // A part may be all -infinity; the row may not.
  if (begin >= end) peak = {-INFINITY, 0.0f, 0x7fffffff, true};
  if (threadIdx.x == 0) peaks[kPeakParts * r + part] = peak;
}

// A step's weights have pushed the scheduler's memory out of the cache: what its next turn reads first is
// asked for while the tokens are sampled.
__device__ void prefetch_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

__device__ void prefetch_turn(const Scheduler& s, int r) {
  const int t = int(threadIdx.x);
  const char* words = reinterpret_cast<const char*>(&s);
  const int seq = s.rows[r].seq;
  if (t == 0) prefetch_line(&s.sequences[seq]);
  if (t == 1) prefetch_line(s.records + s.slot_bytes * seq);
  if (t == 2) prefetch_line(s.records + s.slot_bytes * seq + sizeof(Record));
  if (t == 3) prefetch_line(&s.rows[r]);
  if (t == 4) prefetch_line(s.running + r);
  if (t == 5) prefetch_line(s.marks + r);
  if (t == 6) prefetch_line(s.marks + s.max_running + r);
  if (t == 7) prefetch_line(s.block_tables + size_t(s.max_pages_per_seq) * seq +
                            s.sequences[seq].num_pages);
  if (r == 0 && t >= 8 && t < 8 + int(sizeof(Scheduler) / 128) + 1)
    prefetch_line(words + 128 * (t - 8));
  if (r == 0 && t >= 16 && t < 16 + 2 * s.num_ports)
    prefetch_line(reinterpret_cast<const char*>(s.ports) + 128 * (t - 16));
  if (r == 0 && t == 1000) prefetch_line(s.free_pages + max(s.num_free_pages - 1, 0));
}

// One block of 1,024 threads per row of the bucket. logits: [rows][vocab], changed; raw: the same shape;
// seen: the same shape, zeros; peaks: [rows][16], from peak_step.
extern "C" __global__ void __launch_bounds__(1024) sample_step(const Scheduler* scheduler,
                                                                float* logits, float* raw,
                                                                uint32_t* seen,
                                                                const Peak* peaks) {
  __shared__ Shared sh;
  const Scheduler& s = *scheduler;
  const int r = blockIdx.x;
  if (r >= s.plan->num_rows) return;
  prefetch_turn(s, r);
  if (!(s.rows[r].flags & kRowSample)) return;
  const Row row = s.rows[r];
  float* own = logits + size_t(r) * s.vocab_size;
  float* own_raw = raw + size_t(r) * s.vocab_size;
  const Peak peak = merge_parts(peaks + kPeakParts * r);
  int token = peak.is_sound ? peak.id : -1;
  float chosen = peak.largest;
  const bool penalized = (row.repetition_penalty > 0.0f && row.repetition_penalty != 1.0f) ||
                         row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
  if (peak.is_sound && (row.flags & kRowAlternatives)) {
    find_likeliest(sh, own, s.vocab_size, peak, row.num_logprobs,
                   s.alternatives + size_t(kMaxLogprobs) * r);
    __syncthreads();
  }
  const bool suppressed = (row.flags & kRowSuppressStop) && (s.num_eos || row.num_adjusted);
  const int num_biases = row.num_adjusted ? int(record_of(s, row.seq).num_logit_bias) : 0;
  const bool changed = penalized || suppressed || num_biases;
  if (peak.is_sound && (changed || row.temperature > 0.0f)) {
    uint32_t* own_seen = seen + size_t(r) * s.vocab_size;
    if (num_biases) add_biases(s, row.seq, num_biases, own, own_raw, own_seen);
    if (penalized) penalize(s, row, own, own_raw, own_seen);
    if (num_biases) clear_seen(s, row.seq, num_biases, own_seen);
    if (suppressed) suppress_stops(s, row, own);
    const Peak best = changed ? find_peak(sh, own, 0, s.vocab_size, kThreads) : peak;
    token = best.is_sound ? best.id : -1;
    if (best.is_sound && row.temperature > 0.0f) {
      Sampler sampler{sh, own, s.vocab_size, best.largest, 1.0f / row.temperature, row.min_p};
      token = sampler.draw(row);
    }
    bool has_raw = false;
    if (penalized) has_raw = is_known(s, row, token);
    if (num_biases) has_raw = is_biased(s, row.seq, num_biases, token) || has_raw;
    if (token >= 0) chosen = has_raw ? own_raw[token] : own[token];
  }
  if (threadIdx.x == 0) {
    s.results[r].token = token;
    s.results[r].logprob =
        token < 0 ? __int_as_float(0x7fc00000) : chosen - peak.largest - logf(peak.sum);
    s.history[size_t(s.max_context) * row.seq + row.first_position + row.num_tokens] =
        token < 0 ? 0 : token;
  }
}
