// The GPU's side of the ring: where things are in a port, how tokens are appended, and how a record is
// taken in. Everything read here was written by a NIC and is treated as hostile.
#pragma once
#include "platform.cuh"

namespace blinkbed {

struct PortMemory {
  uint8_t* base;
  const Scheduler* s;

  BB_FN Progress* progress() const { return reinterpret_cast<Progress*>(base + kProgressOffset); }
  BB_FN Counters* counters() const { return reinterpret_cast<Counters*>(base + kCountersOffset); }
  BB_FN const Control* control() const {
    return reinterpret_cast<const Control*>(base + kControlOffset);
  }
  BB_FN const uint64_t* doorbell(uint64_t sequence) const {
    return reinterpret_cast<const uint64_t*>(base + kDoorbellsOffset) +
           (sequence & uint64_t(s->slots_per_port - 1));
  }
  BB_FN const uint32_t* cancel_word(int slot) const {
    return reinterpret_cast<const uint32_t*>(base + s->cancels_offset) + slot;
  }
  BB_FN const uint8_t* slot(int slot) const { return base + s->slots_offset + s->slot_bytes * slot; }
  BB_FN SlotStatus* status(int slot) const {
    return reinterpret_cast<SlotStatus*>(base + s->status_offset) + slot;
  }
  BB_FN TokenEntry* token(uint64_t index) const {
    return reinterpret_cast<TokenEntry*>(base + s->tokens_offset) +
           (index & uint64_t(s->token_ring_entries - 1));
  }
};

BB_FN PortMemory port_memory(const Scheduler& s, int port) {
  return {s.window + s.port_bytes * port, &s};
}
BB_FN Counters& counters_of(Port& port) { return *reinterpret_cast<Counters*>(port.counters); }
BB_FN const Record& record_of(const Scheduler& s, int seq) {
  return *reinterpret_cast<const Record*>(s.records + s.slot_bytes * seq);
}
BB_FN const uint32_t* record_words(const Scheduler& s, int seq) {
  return reinterpret_cast<const uint32_t*>(s.records + s.slot_bytes * seq + sizeof(Record));
}
BB_FN const uint32_t* stop_ids_of(const Scheduler& s, int seq) { return record_words(s, seq); }
// Pairs of a token id and the bits of its bias.
BB_FN const uint32_t* bias_of(const Scheduler& s, int seq) {
  return record_words(s, seq) + record_of(s, seq).num_stop_token_ids;
}
BB_FN const uint32_t* prompt_of(const Scheduler& s, int seq) {
  const Record& r = record_of(s, seq);
  return record_words(s, seq) + r.num_stop_token_ids + 2 * r.num_logit_bias;
}
BB_FN int32_t* history_of(const Scheduler& s, int seq) {
  return s.history + size_t(s.max_context) * seq;
}

// Write the entry at `index` of the log. The sequence word is stored last, with release: a reader that
// sees it sees the rest, and the check catches readers whose copy is not in order (RDMA READ).
BB_FN void write_entry(const PortMemory& port, uint64_t index, int slot, uint32_t generation,
                       int32_t token, float logprob, uint32_t kind, uint32_t reason) {
  TokenEntry entry;
  entry.sequence = index + 1;
  entry.slot = uint32_t(slot);
  entry.generation = generation;
  entry.token = token;
  entry.logprob = logprob;
  entry.kind = uint16_t(kind);
  entry.finish_reason = uint16_t(reason);
#if defined(__CUDACC__)
  entry.check = crc32c_of_entry(reinterpret_cast<const uint32_t*>(&entry));
#else
  entry.check = crc32c(&entry, offsetof(TokenEntry, check));
#endif
  TokenEntry* to = port.token(index);
  to->slot = entry.slot;
  to->generation = entry.generation;
  to->token = entry.token;
  to->logprob = entry.logprob;
  to->kind = entry.kind;
  to->finish_reason = entry.finish_reason;
  to->check = entry.check;
  store_release(&to->sequence, entry.sequence);
}

// Copy `words` u32 out of the window. Once: what is checked is what is used, whatever the NIC does next.
BB_FN void copy_words(const Team& team, uint8_t* to, const uint8_t* from, int first, int words) {
#if defined(BB_PARALLEL)
  for (int i = first + team.rank; i < words; i += team.size)
    reinterpret_cast<uint32_t*>(to)[i] = load_volatile(reinterpret_cast<const uint32_t*>(from) + i);
#else
  (void)team;
  if (words > first) memcpy(to + 4 * first, from + 4 * first, 4 * size_t(words - first));
#endif
  team.sync();
}

// Copy the record in `slot` to private memory; FinishReason_ERROR_TORN unless it is whole and the one
// that `sequence` announced. On success nothing about its contents is known yet but that they are intact.
BB_FN uint32_t copy_record(const Team& team, const Scheduler& s, const PortMemory& port, int slot,
                           int seq, uint64_t sequence) {
  constexpr int header_words = sizeof(Record) / 4;
  uint8_t* to = s.records + s.slot_bytes * seq;
  const Record& record = record_of(s, seq);
  copy_words(team, to, port.slot(slot), 0, header_words);
  const uint32_t bytes = record.record_bytes;
  if (record.sequence != sequence || bytes < sizeof(Record) || bytes > s.slot_bytes || bytes % 4)
    return FinishReason_ERROR_TORN;
  copy_words(team, to, port.slot(slot), header_words, int(bytes / 4));
  const uint32_t crc = team_crc32c(team, to + 4, bytes - 4);
  const int intact = team.leader() && crc == record.crc32c;
  return team.sum(intact) ? FinishReason_NONE : FinishReason_ERROR_TORN;
}

// Is there a new doorbell at `sequence`? One with another session's tag was never rung.
BB_FN bool is_rung(const Port& port, uint64_t sequence, uint64_t word) {
  return uint32_t(word >> 32) == uint32_t(sequence) && port.session != 0 &&
         ((word >> 16) & 0xffff) == (port.session & 0xffff);
}

// Zeroed memory cancels nothing, not even the generation 0 that comes after 2^32 uses of a slot.
BB_FN bool is_cancelled(const PortMemory& port, int slot, uint32_t generation) {
  return generation != 0 && load_acquire(port.cancel_word(slot)) == generation;
}

BB_FN bool is_finite(float x) { return x - x == 0.0f; }

BB_FN bool sampling_is_sound(const Record& r) {
  return is_finite(r.temperature) && r.temperature >= 0 && is_finite(r.top_p) && r.top_p > 0 &&
         r.top_p <= 1 && is_finite(r.min_p) && r.min_p >= 0 && r.min_p <= 1 && r.top_k >= 0 &&
         is_finite(r.repetition_penalty) && r.repetition_penalty > 0 &&
         is_finite(r.frequency_penalty) && is_finite(r.presence_penalty) && r.num_logprobs >= -1 &&
         r.num_logprobs <= kMaxLogprobs;
}

// Every id of the record's tail is below the vocabulary's size, every bias finite.
BB_FN bool ids_are_sound(const Team& team, const Scheduler& s, int seq) {
  const Record& r = record_of(s, seq);
  const uint32_t* words = record_words(s, seq);
  const int bias_start = int(r.num_stop_token_ids), bias_end = bias_start + 2 * int(r.num_logit_bias);
  const int end = bias_end + int(r.num_prompt_tokens);
  int bad = 0;
  for (int i = team.rank; i < end; i += team.size) {
    const bool is_bias = i >= bias_start && i < bias_end && (i - bias_start) % 2;
    float bias;
    memcpy(&bias, &words[i], 4);
    bad += is_bias ? !is_finite(bias) : words[i] >= uint32_t(s.vocab_size);
  }
  return team.sum(bad) == 0;
}

// What is wrong with an intact record, or FinishReason_NONE.
BB_FN uint32_t judge_record(const Team& team, const Scheduler& s, const Port& port, int slot, int seq) {
  const Record& r = record_of(s, seq);
  if (r.epoch != s.epoch) return FinishReason_ERROR_EPOCH;
  if (r.session != port.session) return FinishReason_ERROR_SESSION;
  if (r.slot != uint32_t(slot)) return FinishReason_ERROR_RECORD;
  if (r.generation != s.sequences[seq].generation + 1) return FinishReason_ERROR_GENERATION;
  if (r.num_stop_token_ids > uint32_t(kMaxStopTokenIds) ||
      r.num_logit_bias > uint32_t(kMaxLogitBias) || r.num_prompt_tokens < 1 ||
      r.num_prompt_tokens > uint32_t(s.max_context))
    return FinishReason_ERROR_RECORD;
  const uint32_t words = r.num_stop_token_ids + 2 * r.num_logit_bias + r.num_prompt_tokens;
  if (r.record_bytes != sizeof(Record) + 4 * words) return FinishReason_ERROR_RECORD;
  if (!sampling_is_sound(r) || r.max_tokens < 1 || r.num_logprobs >= s.token_ring_entries)
    return FinishReason_ERROR_PARAMETERS;
  const uint64_t total = uint64_t(r.num_prompt_tokens) + r.max_tokens;
  if (total > uint64_t(s.max_context) || total > uint64_t(s.num_pages) * s.page_size)
    return FinishReason_ERROR_CONTEXT;
  if (!ids_are_sound(team, s, seq)) return FinishReason_ERROR_TOKEN_ID;
  return FinishReason_NONE;
}

}  // namespace blinkbed
