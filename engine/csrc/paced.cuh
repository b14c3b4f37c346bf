// The paced model: the scripted model's tokens, and the time that a real GPU takes for the step, by a
// profile that `blinkbed calibrate` measured (engine/model/pace.py has the same formula). For the
// simulator: it waits on the CPU, and writes down when it could not keep the pace.
#pragma once
#include "scripted.cuh"

namespace blinkbed {

constexpr int kMaxPaceBuckets = 32;

// engine/model/pace.py: PACE
struct Pace {
  int32_t num_buckets, reserved;
  int32_t buckets[kMaxPaceBuckets];  // tokens of a step at most, ascending
  double base_ns[kMaxPaceBuckets];
  double ns_per_decode_context, ns_per_prefill_pair, ns_per_prefill_context;
};

BB_FN uint64_t pace_of(const Pace& pace, const Plan& plan, const Row* rows) {
  int bucket = 0;
  while (bucket < pace.num_buckets - 1 && pace.buckets[bucket] < plan.num_tokens) bucket++;
  double decode_context = 0, prefill_pairs = 0, prefill_context = 0;
  for (int i = 0; i < plan.num_rows; i++) {
    const double n = rows[i].num_tokens, offset = rows[i].first_position;
    if (i < plan.num_decode_rows) {
      decode_context += offset;
    } else {
      prefill_pairs += n * offset + n * (n + 1) / 2;
      prefill_context += offset + n;
    }
  }
  return uint64_t(pace.base_ns[bucket] + pace.ns_per_decode_context * decode_context +
                  pace.ns_per_prefill_pair * prefill_pairs +
                  pace.ns_per_prefill_context * prefill_context);
}

#if !defined(__CUDACC__)
constexpr uint64_t kSpinNs = 150000;     // the last part of a wait: a sleep ends some 60 us late
constexpr uint64_t kLongestNapNs = 2000000;  // between two signs of life
constexpr double kLateShare = 0.05;      // of a step: from here on it counts as late

inline void show_pass(const Scheduler& s, uint64_t late_ns) {
  for (int p = 0; p < s.num_ports; p++) {
    Progress* progress = port_memory(s, p).progress();
    progress->pace_late_steps += late_ns > 0;
    progress->pace_late_ns += late_ns;
    store_release(&progress->pass_beat, progress->pass_beat + 1);
  }
}

// Until `length_ns` after `started`.
inline void keep_pace(const Scheduler& s, uint64_t started, uint64_t length_ns) {
  const uint64_t end = started + length_ns;
  for (uint64_t now = clock_ns(); now < end; now = clock_ns()) {
    const uint64_t left = end - now;
    if (left < kSpinNs) continue;
    const uint64_t nap = left - kSpinNs < kLongestNapNs ? left - kSpinNs : kLongestNapNs;
    const timespec wait{0, long(nap)};
    nanosleep(&wait, nullptr);
    show_pass(s, 0);
  }
  const uint64_t late_ns = clock_ns() - end;
  if (double(late_ns) > kLateShare * double(length_ns)) show_pass(s, late_ns);
}
#endif

}  // namespace blinkbed
