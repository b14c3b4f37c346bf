// A producer thread and the scheduler in one process, as fast as they go: records of random size, whose
// every word follows from the sequence number, some with the doorbell rung before the payload. A record
// that was executed torn shows as a prompt that its sequence number does not give.
#include <sched.h>

#include <thread>

#include "step.cuh"

using namespace blinkbed;

extern "C" int bb_take_entries(const TokenEntry* log, uint64_t entries, uint64_t head, TokenEntry* out,
                               int max);

namespace {

constexpr int kMaxSlots = 64;

struct Report {
  uint64_t ended, errors, misrouted, executed, executed_torn;
};

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 29);
}

uint32_t prompt_word(const Scheduler& s, uint64_t sequence, uint32_t i) {
  return uint32_t(mix(sequence * 65537 + i) >> 20) % uint32_t(s.vocab_size);
}

uint32_t prompt_length(const Scheduler& s, uint64_t sequence) {
  return 1 + uint32_t(mix(sequence) >> 20) % uint32_t(s.max_context - 1);
}

struct Producer {
  const Scheduler& s;
  uint8_t* base;
  Report& report;
  uint64_t sequence = 0, head = 0;
  int slots[kMaxSlots] = {}, num_free = 0;
  uint32_t generations[kMaxSlots] = {};
  uint64_t sequences[kMaxSlots] = {};
  uint32_t words[32 + 65536] = {};

  PortMemory port() const { return {base, &s}; }
  Control* control() const { return reinterpret_cast<Control*>(base + kControlOffset); }

  void post() {
    const int slot = slots[--num_free];
    sequences[slot] = ++sequence;
    Record* record = reinterpret_cast<Record*>(words);
    record->epoch = s.epoch;
    record->session = 1;
    record->sequence = sequence;
    record->slot = uint32_t(slot);
    record->generation = ++generations[slot];
    record->num_prompt_tokens = prompt_length(s, sequence);
    record->max_tokens = 1;
    record->num_logprobs = -1;
    record->top_p = record->repetition_penalty = 1;
    for (uint32_t i = 0; i < record->num_prompt_tokens; i++)
      words[32 + i] = prompt_word(s, sequence, i);
    record->record_bytes = uint32_t(sizeof(Record)) + 4 * record->num_prompt_tokens;
    record->crc32c = crc32c(&record->record_bytes, record->record_bytes - 4);

    const size_t n = record->record_bytes, cut = mix(sequence + 7) % n;
    uint8_t* to = base + s.slots_offset + s.slot_bytes * uint64_t(slot);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(words);
    const uint64_t bell = sequence << 32 | 1ull << 16 | uint64_t(slot);
    uint64_t* doorbell = const_cast<uint64_t*>(port().doorbell(sequence));
    // The doorbell overtakes all, or a part, and at times the device is given time to see that.
    const int when = int(sequence % 8);
    auto ring = [&] {
      store_release(doorbell, bell);
      if (mix(sequence) % 16 == 0) sched_yield();
    };
    if (when == 0) ring();
    memcpy(to + cut, from + cut, n - cut);
    if (when == 1) ring();
    memcpy(to, from, cut);
    if (when >= 2) store_release(doorbell, bell);
  }

  // Returns how many entries came.
  int take() {
    TokenEntry entries[64];
    const int n = bb_take_entries(port().token(0), uint64_t(s.token_ring_entries), head, entries, 64);
    for (int i = 0; i < n; i++) {
      const TokenEntry& e = entries[i];
      const bool known = e.slot < uint32_t(s.slots_per_port) && e.generation == generations[e.slot] &&
                         sequences[e.slot] != 0;
      if (!known) {
        report.misrouted++;
        continue;
      }
      report.errors += e.finish_reason != FinishReason_LENGTH;
      report.misrouted += uint32_t(e.token) != prompt_word(s, sequences[e.slot], 0);
      report.ended++;
      sequences[e.slot] = 0;
      slots[num_free++] = int(e.slot);
    }
    head += uint64_t(n);
    if (n) store_release(&control()->consumer_index, head);
    return n;
  }

  void run(uint64_t count, uint64_t until_ns) {
    for (int slot = s.slots_per_port; slot--;) slots[num_free++] = slot;
    store_release(&control()->session, 1u);
    while (load_acquire(&port().progress()->session_ack) != 1) sched_yield();
    while (report.ended < count && clock_ns() < until_ns) {
      while (num_free && sequence < count) post();
      if (!take()) sched_yield();
    }
  }
};

}  // namespace

// The model says the prompt's first word. The state must be fresh, its first port is used.
extern "C" void bb_torture(Scheduler* s, uint64_t count, uint64_t timeout_ns, Report* report) {
  const uint64_t until_ns = clock_ns() + timeout_ns;
  static Producer producer{*s, s->window, *report};
  bool is_done = false;
  std::thread thread([&] {
    producer.run(count, until_ns);
    __atomic_store_n(&is_done, true, __ATOMIC_RELEASE);
  });
  while (!__atomic_load_n(&is_done, __ATOMIC_ACQUIRE)) {
    scheduler_step(Team{}, *s, *s->plan, s->rows, s->results);
    for (int i = 0; i < s->plan->num_rows; i++) {
      const Sequence& q = s->sequences[s->rows[i].seq];
      const int32_t* history = history_of(*s, s->rows[i].seq);
      bool whole = uint32_t(q.num_prompt) == prompt_length(*s, q.sequence);
      for (int k = 0; k < q.num_prompt; k++)
        whole &= uint32_t(history[k]) == prompt_word(*s, q.sequence, uint32_t(k));
      report->executed++;
      report->executed_torn += !whole;
      s->results[i] = {history[0], 0.0f};
    }
    if (!s->plan->num_rows) sched_yield();
  }
  thread.join();
}
