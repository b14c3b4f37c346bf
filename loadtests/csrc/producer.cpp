// A SmartNIC of one port in a process of its own, as fast as it goes: records of random size whose every
// word follows from the sequence number, some with the doorbell rung before the payload. `torture.cu`
// checks on the GPU what was executed.
#include <sched.h>

#include "platform.cuh"

using namespace blinkbed;

extern "C" int bb_take_entries(const TokenEntry* log, uint64_t entries, uint64_t head, TokenEntry* out,
                               int max);

namespace {

constexpr int kMaxSlots = 4096;

struct Report {
  uint64_t posted, ended, errors, misrouted, round_trip_ns, elapsed_ns;
};

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 29);
}

struct Layout {
  uint64_t cancels, slots, tokens, token_ring_entries;
};

class Producer {
 public:
  Producer(uint8_t* base, const Layout& layout, bool overtake, Report& report)
      : base_(base), layout_(layout), overtake_(overtake), report_(report),
        identity_(*reinterpret_cast<const Identity*>(base)) {}

  void run(uint64_t count, uint64_t until_ns) {
    for (int slot = int(identity_.num_slots); slot--;) slots_[num_free_++] = slot;
    Control* control = reinterpret_cast<Control*>(base_ + kControlOffset);
    const Progress* progress = reinterpret_cast<const Progress*>(base_ + kProgressOffset);
    store_release(&control->session, 1u);
    while (load_acquire(&progress->session_ack) != 1 && clock_ns() < until_ns) sched_yield();
    const uint64_t started = clock_ns();
    while (report_.ended < count && clock_ns() < until_ns) {
      while (num_free_ && report_.posted < count) post();
      take(control);
    }
    report_.elapsed_ns = clock_ns() - started;
  }

 private:
  uint32_t word(uint64_t sequence, uint32_t i) const {
    return uint32_t(mix(sequence * 65537 + i) >> 20) % identity_.vocab_size;
  }

  void post() {
    const int slot = slots_[--num_free_];
    const uint64_t sequence = ++report_.posted;
    sequences_[slot] = sequence;
    Record* record = reinterpret_cast<Record*>(words_);
    record->epoch = identity_.epoch;
    record->session = 1;
    record->sequence = sequence;
    record->slot = uint32_t(slot);
    record->generation = ++generations_[slot];
    record->num_prompt_tokens =
        1 + uint32_t(mix(sequence) >> 20) % uint32_t(identity_.max_context - 1);
    record->max_tokens = 1;
    record->num_logprobs = -1;
    record->top_p = record->repetition_penalty = 1;
    for (uint32_t i = 0; i < record->num_prompt_tokens; i++) words_[32 + i] = word(sequence, i);
    record->record_bytes = uint32_t(sizeof(Record)) + 4 * record->num_prompt_tokens;
    record->crc32c = crc32c(&record->record_bytes, record->record_bytes - 4);
    uint8_t* to = base_ + layout_.slots + uint64_t(identity_.slot_bytes) * uint64_t(slot);
    send(to, record->record_bytes, sequence, slot);
  }

  // The doorbell overtakes all, or a part, of some records.
  void send(uint8_t* to, size_t n, uint64_t sequence, int slot) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(words_);
    const size_t cut = mix(sequence + 7) % n;
    uint64_t* doorbell = reinterpret_cast<uint64_t*>(base_ + kDoorbellsOffset) +
                         (sequence & (identity_.num_slots - 1));
    const uint64_t bell = sequence << 32 | 1ull << 16 | uint64_t(slot);
    const int when = overtake_ ? int(sequence % 8) : 7;
    posted_ns_[slot] = clock_ns();
    if (when == 0) store_release(doorbell, bell);
    memcpy(to + cut, from + cut, n - cut);
    if (when == 1) store_release(doorbell, bell);
    memcpy(to, from, cut);
    if (when >= 2) store_release(doorbell, bell);
  }

  void take(Control* control) {
    TokenEntry entries[64];
    const TokenEntry* log = reinterpret_cast<const TokenEntry*>(base_ + layout_.tokens);
    const int n = bb_take_entries(log, layout_.token_ring_entries, head_, entries, 64);
    const uint64_t now = clock_ns();
    for (int i = 0; i < n; i++) {
      const TokenEntry& e = entries[i];
      if (e.slot >= identity_.num_slots || e.generation != generations_[e.slot] ||
          !sequences_[e.slot]) {
        report_.misrouted++;
        continue;
      }
      report_.errors += e.finish_reason != FinishReason_LENGTH;
      report_.misrouted += uint32_t(e.token) != word(sequences_[e.slot], 0);
      report_.ended++;
      report_.round_trip_ns += now - posted_ns_[e.slot];
      sequences_[e.slot] = 0;
      slots_[num_free_++] = int(e.slot);
    }
    head_ += uint64_t(n);
    if (n) store_release(&control->consumer_index, head_);
  }

  uint8_t* base_;
  const Layout layout_;
  const bool overtake_;
  Report& report_;
  const Identity& identity_;
  uint64_t head_ = 0;
  int slots_[kMaxSlots] = {}, num_free_ = 0;
  uint32_t generations_[kMaxSlots] = {};
  uint64_t sequences_[kMaxSlots] = {}, posted_ns_[kMaxSlots] = {};
  uint32_t words_[32 + 65536] = {};
};

}  // namespace

extern "C" void bb_torture_port(uint8_t* base, const Layout* layout, int overtake, uint64_t count,
                                uint64_t timeout_ns, Report* report) {
  Producer* producer = new Producer(base, *layout, overtake != 0, *report);
  producer->run(count, clock_ns() + timeout_ns);
  delete producer;
}
