// The model of the torture run: says the prompt's first word, and counts what was executed, and what of
// it was not what the sequence number gives (`producer.cpp` has the same two functions).
#include "step.cuh"

using namespace blinkbed;

namespace {

__device__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 29);
}

}  // namespace

// counts: executed, executed torn. Launched with one block.
extern "C" __global__ void torture_pass(Scheduler* scheduler, unsigned long long* counts) {
  Scheduler& s = *scheduler;
  for (int i = 0; i < s.plan->num_rows; i++) {
    if (!(s.rows[i].flags & kRowSample)) continue;  // a chunk of a prompt
    const int seq = s.rows[i].seq;
    const Sequence& q = s.sequences[seq];
    const int32_t* history = s.history + size_t(s.max_context) * seq;
    const uint32_t length = 1 + uint32_t(mix(q.sequence) >> 20) % uint32_t(s.max_context - 1);
    bool torn = uint32_t(q.num_prompt) != length;
    for (int k = threadIdx.x; k < q.num_prompt; k += blockDim.x)
      torn |= uint32_t(history[k]) !=
              uint32_t(mix(q.sequence * 65537 + k) >> 20) % uint32_t(s.vocab_size);
    torn = __syncthreads_or(torn);
    if (threadIdx.x) continue;
    counts[0]++;
    counts[1] += torn;
    s.results[i].token = history[0];
    s.results[i].logprob = 0.0f;
    s.history[size_t(s.max_context) * seq + s.rows[i].first_position + s.rows[i].num_tokens] =
        history[0];
  }
}
