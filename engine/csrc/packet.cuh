// What a host-driven path sends to the device for a pass, and what comes back.
//
// The host's scheduler works on the host's memory; the device has arrays of its own for the pass: plan,
// rows, history, block tables. A packet brings them up to date. Sampled tokens are not in it: the pass
// that sampled them wrote them into the device's history, so the next pass finds them there, also when
// it was planned before they were known (asynchronous batching).
//
//   packet: Plan | Row[num_rows] | block table[num_rows][max_pages_per_seq] | int32[num_tokens] |
//           adjustments of the rows that are their sequence's first and have any
//   adjustments: u32 stop ids, u32 biases, then those words as in the record
//   answer: u64 started_ns | u64 ended_ns | Result[max_running] | Result[max_running][kMaxLogprobs], the
//           times by the device's clock; the last part where rows want alternatives, else not fetched
#pragma once
#include "sequences.cuh"

namespace blinkbed {

struct PacketParts {
  size_t rows, tables, tokens, adjustments;  // offsets in bytes
};

BB_FN PacketParts packet_parts(const Scheduler& s, int num_rows, int num_tokens) {
  PacketParts parts;
  parts.rows = sizeof(Plan);
  parts.tables = parts.rows + sizeof(Row) * size_t(num_rows);
  parts.tokens = parts.tables + sizeof(int32_t) * size_t(num_rows) * size_t(s.max_pages_per_seq);
  parts.adjustments = parts.tokens + sizeof(int32_t) * size_t(num_tokens);
  return parts;
}

// Tokens of a row that the device may not know: those of the prompt.
BB_FN int num_prompt_of(const Row& row) {
  const int left = row.num_prompt_tokens - row.first_position;
  return left < 0 ? 0 : left < row.num_tokens ? left : row.num_tokens;
}

constexpr int kMostAdjustmentWords = 2 + kMaxStopTokenIds + 2 * kMaxLogitBias;

// What a sequence's samplers read of its record comes with its first row, after a preemption again.
BB_FN bool brings_adjustments(const Row& row) {
  return row.first_position == 0 && row.num_adjusted != 0;
}

BB_FN int num_adjustment_words(uint32_t num_stop_token_ids, uint32_t num_logit_bias) {
  return int(num_stop_token_ids + 2 * num_logit_bias);
}

// Into the device's own record of the sequence; returns where the next row's begin.
BB_FN const uint32_t* apply_adjustments(const Team& team, Scheduler& s, const Row& row,
                                        const uint32_t* from) {
  Record& record = *reinterpret_cast<Record*>(s.records + s.slot_bytes * row.seq);
  uint32_t* words = reinterpret_cast<uint32_t*>(&record + 1);
  const int n = num_adjustment_words(from[0], from[1]);
  if (team.leader()) {
    record.num_stop_token_ids = from[0];
    record.num_logit_bias = from[1];
  }
  for (int k = team.rank; k < n; k += team.size) words[k] = from[2 + k];
  return from + 2 + n;
}

// On the device, before the pass.
BB_FN void apply_packet(const Team& team, Scheduler& s, const uint8_t* packet) {
  const Plan& plan = *reinterpret_cast<const Plan*>(packet);
  const PacketParts parts = packet_parts(s, plan.num_rows, plan.num_tokens);
  const Row* rows = reinterpret_cast<const Row*>(packet + parts.rows);
  const int32_t* tables = reinterpret_cast<const int32_t*>(packet + parts.tables);
  const int32_t* tokens = reinterpret_cast<const int32_t*>(packet + parts.tokens);
  const uint32_t* adjustments = reinterpret_cast<const uint32_t*>(packet + parts.adjustments);
  for (int i = team.rank; i < plan.num_rows; i += team.size) {
    s.rows[i] = rows[i];
    if (rows[i].first_position == 0) {
      s.sequences[rows[i].seq].num_prompt = rows[i].num_prompt_tokens;
      s.sequences[rows[i].seq].script_length = -1;
    }
  }
  // Flat over all tables: on a GPU one row after the other would wait for memory each time.
  const int width = s.max_pages_per_seq;
  for (int k = team.rank; k < plan.num_rows * width; k += team.size) {
    const Row& row = rows[k / width];
    if (k % width < pages_for(s, row.first_position + row.num_tokens))
      s.block_tables[size_t(width) * row.seq + k % width] = tables[k];
  }
  for (int i = 0; i < plan.num_rows; i++) {
    const int num_prompt = num_prompt_of(rows[i]);
    int32_t* history = history_of(s, rows[i].seq) + rows[i].first_position;
    for (int k = team.rank; k < num_prompt; k += team.size)
      history[k] = tokens[rows[i].query_start + k];
    if (brings_adjustments(rows[i])) adjustments = apply_adjustments(team, s, rows[i], adjustments);
  }
  if (team.leader()) *s.plan = plan;
  team.sync();
}

}  // namespace blinkbed
