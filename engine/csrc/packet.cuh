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
#include "sequences.cuh"

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

// On the device, before the pass.
BB_FN void apply_packet(const Team& team, Scheduler& s, const uint8_t* packet) {
  const Plan& plan = *reinterpret_cast<const Plan*>(packet);
  const PacketParts parts = packet_parts(s, plan.num_rows, plan.num_tokens);
  const Row* rows = reinterpret_cast<const Row*>(packet + parts.rows);
  const int32_t* tables = reinterpret_cast<const int32_t*>(packet + parts.tables);
  const int32_t* tokens = reinterpret_cast<const int32_t*>(packet + parts.tokens);
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
  }
  if (team.leader()) *s.plan = plan;
  team.sync();
}

}  // namespace blinkbed
