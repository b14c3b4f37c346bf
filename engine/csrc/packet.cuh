// What a host-driven path sends to the device for a pass, and what comes back.
//
// The host's scheduler works on the host's memory; the device has arrays of its own for the pass: plan,
// rows, history, block tables. A packet brings them up to date. Sampled tokens are not in it: the pass
// that sampled them wrote them into the device's history, so the next pass finds them there, also when
// it was planned before they were known (asynchronous batching).
//
//   packet: Plan | Row[num_rows] | block table[num_rows][max_pages_per_seq] | int32[num_tokens]
//   answer: u64 started_ns | u64 ended_ns | Result[num_rows], the times by the device's clock
#pragma once
#include "ring.cuh"

namespace blinkbed {

struct PacketParts {
  size_t rows, tables, tokens, end;  // offsets in bytes
};

BB_FN PacketParts packet_parts(const Scheduler& s, int num_rows, int num_tokens) {
  PacketParts parts;
  parts.rows = sizeof(Plan);
  parts.tables = parts.rows + sizeof(Row) * size_t(num_rows);
  parts.tokens = parts.tables + sizeof(int32_t) * size_t(num_rows) * size_t(s.max_pages_per_seq);
  parts.end = parts.tokens + sizeof(int32_t) * size_t(num_tokens);
  return parts;
}

// Tokens of a row that the device may not know: those of the prompt.
BB_FN int num_prompt_of(const Row& row) {
  const int left = row.num_prompt_tokens - row.first_position;
  return left < 0 ? 0 : left < row.num_tokens ? left : row.num_tokens;
}

// On the device, before the pass. One thread of the team for each row.
BB_FN void apply_packet(const Team& team, Scheduler& s, const uint8_t* packet) {
  const Plan& plan = *reinterpret_cast<const Plan*>(packet);
  const PacketParts parts = packet_parts(s, plan.num_rows, plan.num_tokens);
  const Row* rows = reinterpret_cast<const Row*>(packet + parts.rows);
  const int32_t* tables = reinterpret_cast<const int32_t*>(packet + parts.tables);
  const int32_t* tokens = reinterpret_cast<const int32_t*>(packet + parts.tokens);
  for (int i = team.rank; i < plan.num_rows; i += team.size) {
    const Row& row = rows[i];
    s.rows[i] = row;
    int32_t* table = s.block_tables + size_t(s.max_pages_per_seq) * row.seq;
    for (int k = 0; k < s.max_pages_per_seq; k++)
      table[k] = tables[size_t(i) * s.max_pages_per_seq + k];
    int32_t* history = history_of(s, row.seq) + row.first_position;
    for (int k = 0; k < num_prompt_of(row); k++) history[k] = tokens[row.query_start + k];
    if (row.first_position == 0) {
      s.sequences[row.seq].num_prompt = row.num_prompt_tokens;
      s.sequences[row.seq].script_length = -1;
    }
  }
  if (team.leader()) *s.plan = plan;
  team.sync();
}

}  // namespace blinkbed
