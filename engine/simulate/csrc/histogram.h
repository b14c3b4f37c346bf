// Durations in bounded memory: buckets of equal width within each power of two, 0.2 % wide at most.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace blinkbed {

class Histogram {
 public:
  void add(uint64_t ns) {
    counts_[bucket_of(ns)]++;
    count_++;
    sum_ += ns;
    if (ns > max_) max_ = ns;
  }
  uint64_t count() const { return count_; }
  uint64_t max() const { return max_; }
  double mean() const { return count_ ? double(sum_) / double(count_) : 0.0; }

  // The value that `share` of all are not above (nearest rank), by the middle of its bucket.
  double quantile(double share) const {
    const double wanted = share * double(count_);
    uint64_t below = 0;
    for (size_t i = 0; i < counts_.size(); i++) {
      below += counts_[i];
      if (counts_[i] && double(below) >= wanted) return middle_of(i);
    }
    return double(max_);
  }

 private:
  static constexpr int kBits = 9;
  static constexpr uint64_t kWide = uint64_t{1} << kBits;

  static size_t bucket_of(uint64_t ns) {
    if (ns < kWide) return ns;
    const int shift = 63 - __builtin_clzll(ns) - kBits;
    return (size_t(shift + 1) << kBits) + ((ns >> shift) & (kWide - 1));
  }
  static double middle_of(size_t bucket) {
    if (bucket < kWide) return double(bucket);
    const int shift = int(bucket >> kBits) - 1;
    const double width = double(uint64_t{1} << shift);
    return (double(kWide + (bucket & (kWide - 1))) + 0.5) * width;
  }

  std::vector<uint64_t> counts_ = std::vector<uint64_t>((64 - kBits + 1) << kBits);
  uint64_t count_ = 0, sum_ = 0, max_ = 0;
};

}  // namespace blinkbed
