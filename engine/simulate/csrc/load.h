// The SmartNIC's side in virtual time: posts each request when it arrives and a slot is free, takes tokens
// as soon as they are published, and keeps what a client would have seen.
#pragma once
#include "histogram.h"
#include "ring.cuh"

namespace blinkbed {

struct Request {
  uint64_t arrival_ns;
  int32_t num_prompt, num_output;
};

class Load {
 public:
  Load(Scheduler& s, uint64_t link_ns, bool ends_by_eos)
      : s_(s), memory_(port_memory(s, 0)), link_ns_(link_ns), ends_by_eos_(ends_by_eos) {
    in_slots_.resize(size_t(s.slots_per_port));
    generations_.resize(size_t(s.slots_per_port));
    for (int slot = s.slots_per_port - 1; slot >= 0; slot--) free_.push_back(slot);
    store_release(&control()->session, kSession);
  }

  void feed(const uint64_t* arrivals_ns, const int32_t* prompts, const int32_t* outputs, size_t n,
            bool is_last) {
    waiting_.erase(waiting_.begin(), waiting_.begin() + long(next_));
    next_ = 0;
    for (size_t i = 0; i < n; i++) waiting_.push_back({arrivals_ns[i], prompts[i], outputs[i]});
    is_last_ = is_last;
  }

  // May time go on before more requests are known? A turn posts at most as many as there are slots.
  bool knows_enough(int turns) const {
    return is_last_ || waiting_.size() - next_ > size_t(turns) * in_slots_.size();
  }
  bool is_over() const { return is_last_ && !has_next() && free_.size() == in_slots_.size(); }
  bool has_next() const { return next_ < waiting_.size(); }
  uint64_t next_ns() const { return waiting_[next_].arrival_ns + link_ns_; }

  void post_until(uint64_t now_ns) {
    while (has_next() && next_ns() <= now_ns) {
      if (free_.empty()) {
        full_at_ns_ = now_ns;
        return;
      }
      num_delayed += next_ns() <= full_at_ns_;
      post(waiting_[next_++]);
    }
  }

  void take_tokens(uint64_t now_ns) {
    const uint64_t tail = s_.ports[0].token_tail;
    for (; head_ < tail; head_++) take(*memory_.token(head_), now_ns + link_ns_);
    store_release(&control()->consumer_index, head_);
  }

  // What the model says in a planned pass.
  void sample(const Plan& plan, const Row* rows, Result* results) const {
    for (int i = 0; i < plan.num_rows; i++) {
      if (!(rows[i].flags & kRowSample)) continue;
      results[i] = Result{kSomeToken, 0.0f};
      if (!ends_by_eos_) continue;
      const int known = rows[i].first_position + rows[i].num_tokens - rows[i].num_prompt_tokens;
      if (known + 1 >= in_slots_[size_t(rows[i].seq)].num_output) results[i].token = s_.eos[0];
    }
  }

  Histogram ttft, tpot, itl;
  uint64_t num_finished = 0, num_failed = 0, num_delayed = 0, num_tokens = 0;
  uint64_t first_arrival_ns = 0, last_token_ns = 0;

 private:
  static constexpr uint32_t kSession = 1;
  static constexpr int32_t kSomeToken = 0;

  struct InSlot {
    uint64_t arrival_ns, first_ns, last_ns;
    int32_t num_output, num_seen;
  };

  Control* control() const { return const_cast<Control*>(memory_.control()); }

  void post(const Request& request) {
    const int slot = free_.back();
    free_.pop_back();
    if (!first_arrival_ns) first_arrival_ns = request.arrival_ns;
    in_slots_[size_t(slot)] = {request.arrival_ns, 0, 0, request.num_output, 0};
    Record record{};
    record.record_bytes = uint32_t(sizeof(Record)) + 4 * uint32_t(request.num_prompt);
    record.epoch = s_.epoch;
    record.session = kSession;
    record.sequence = ++sequence_;
    record.slot = uint32_t(slot);
    record.generation = ++generations_[size_t(slot)];
    record.flags = ends_by_eos_ ? 0u : uint32_t(kRequestIgnoreEos);
    record.num_prompt_tokens = uint32_t(request.num_prompt);
    record.max_tokens = uint32_t(ends_by_eos_ ? most_tokens() - request.num_prompt : request.num_output);
    record.num_logprobs = -1;
    record.top_p = record.repetition_penalty = 1.0f;
    // The ids behind it are the window's zeros: a prompt of the token 0.
    uint8_t* at = const_cast<uint8_t*>(memory_.slot(slot));
    memcpy(at, &record, sizeof record);
    record.crc32c = crc32c(at + 4, record.record_bytes - 4);
    memcpy(at, &record.crc32c, 4);
    store_release(const_cast<uint64_t*>(memory_.doorbell(sequence_)),
                  sequence_ << 32 | uint64_t(kSession) << 16 | uint64_t(slot));
  }

  int most_tokens() const {
    const int64_t pool = int64_t(s_.num_pages) * s_.page_size;
    return pool < s_.max_context ? int(pool) : s_.max_context;
  }

  void take(const TokenEntry& entry, uint64_t now_ns) {
    InSlot& one = in_slots_[entry.slot];
    if (entry.kind == EntryKind_TOKEN) {
      if (one.num_seen)
        itl.add(now_ns - one.last_ns);
      else
        ttft.add((one.first_ns = now_ns) - one.arrival_ns);
      one.last_ns = now_ns;
      one.num_seen++;
      num_tokens++;
      last_token_ns = now_ns;
    }
    if (entry.finish_reason == FinishReason_NONE) return;
    num_finished++;
    num_failed += entry.finish_reason >= uint32_t(kFirstError);
    if (one.num_seen > 1) tpot.add((one.last_ns - one.first_ns) / uint64_t(one.num_seen - 1));
    free_.push_back(int(entry.slot));
  }

  Scheduler& s_;
  const PortMemory memory_;
  const uint64_t link_ns_;
  const bool ends_by_eos_;
  std::vector<Request> waiting_;
  std::vector<InSlot> in_slots_;
  std::vector<uint32_t> generations_;
  std::vector<int> free_;
  size_t next_ = 0;
  bool is_last_ = false;
  uint64_t head_ = 0, sequence_ = 0, full_at_ns_ = 0;
};

}  // namespace blinkbed
