// Plan: the rows of the next pass, decodes first, then prefill chunks within the budget.
#pragma once
#include "sequences.cuh"

namespace blinkbed {

BB_FN void write_row(const Scheduler& s, Row& row, int seq, int query_start, int num_tokens) {
  Sequence& q = s.sequences[seq];
  const Record& r = record_of(s, seq);
  row.seq = seq;
  row.query_start = query_start;
  row.num_tokens = num_tokens;
  row.first_position = q.num_computed;
  row.temperature = r.temperature;
  row.top_p = r.top_p;
  row.min_p = r.min_p;
  row.top_k = r.top_k;
  row.repetition_penalty = r.repetition_penalty;
  row.frequency_penalty = r.frequency_penalty;
  row.presence_penalty = r.presence_penalty;
  row.num_prompt_tokens = q.num_prompt;
  row.num_logprobs = r.num_logprobs;
  row.num_adjusted = int(r.num_logit_bias);
  const bool may_stop = length_of(q) >= q.min_total;
  if (!may_stop) row.num_adjusted += int(r.num_stop_token_ids);
  row.flags = 0;
  row.uniform = 0;
  q.num_computed += num_tokens;
  if (q.num_computed < length_of(q)) return;
  row.flags = kRowSample | (r.num_logprobs > 0 ? kRowAlternatives : 0);
  if (!may_stop) row.flags |= kRowSuppressStop;
  if (r.temperature > 0) row.uniform = philox_uniform(r.seed, uint32_t(length_of(q)));
  q.pending++;
}

// marks[i] = tokens of running[i] in this step, 0 for none: those whose port has room for the sample that
// they end with. Who finds no room holds back those behind it, so that they do not take it for ever.
template <class Tokens>
BB_FN void mark(const Team& team, Scheduler& s, Tokens tokens) {
  for (int i = team.rank; i < s.num_running; i += team.size) s.marks[i] = 0;
  team.sync();
  for (int p = 0; p < s.num_ports; p++) {
    Port& port = s.ports[p];
    const int room = port.room;
    auto mine = [&](int i) { return port_of(s, s.running[i]) == p; };
    auto samples = [&](int i) {
      return tokens(i) == remaining_of(s.sequences[s.running[i]]) && tokens(i) > 0;
    };
    for (int i = team.rank; i < s.num_running; i += team.size)
      if (mine(i) && !samples(i)) s.marks[i] = tokens(i);
    auto entries = [&](int i) { return s.sequences[s.running[i]].num_entries; };
    int own_granted = 0, own_stalls = 0;
    const int wanted = scan_each(
        team, s.num_running, 0, [&](int i) { return mine(i) && samples(i) ? entries(i) : 0; },
        [&](int i, int at) {
          const bool fits = at + entries(i) <= room;
          s.marks[i] = fits ? tokens(i) : 0;
          own_granted += fits ? entries(i) : 0;
          own_stalls += !fits;
        });
    const bool all_fit = wanted <= room;
    const int granted = all_fit ? wanted : team.sum(own_granted);
    const int stalls = all_fit ? 0 : team.sum(own_stalls);
    if (team.leader()) {
      port.room -= granted;
      port.in_flight += granted;
      counters_of(port).ring_stalls += stalls;
    }
    team.sync();
  }
}

// Rows for the marked; returns the number of rows so far and adds the tokens to *num_tokens.
BB_FN int write_rows(const Team& team, Scheduler& s, Row* rows, int num_rows, int* num_tokens) {
  const int first_row = num_rows, n = s.num_running;
  num_rows = scan_each(
      team, n, num_rows, [&](int i) { return s.marks[i] ? 1 : 0; },
      [&](int i, int at) { rows[at].seq = i; });
  int start = *num_tokens;
  start = scan_each(
      team, num_rows - first_row, start, [&](int k) { return s.marks[rows[first_row + k].seq]; },
      [&](int k, int at) {
        Row& row = rows[first_row + k];
        const int i = row.seq;
        write_row(s, row, s.running[i], at, s.marks[i]);
      });
  *num_tokens = start;
  return num_rows;
}

BB_FN void plan_step(const Team& team, Scheduler& s, Plan& plan, Row* rows) {
  if (s.must_drain) {
    if (team.leader()) plan.num_rows = 0;
    return team.sync();
  }
  int num_tokens = 0;
  mark(team, s, [&](int i) { return is_decode(s.sequences[s.running[i]]) ? 1 : 0; });
  const int decodes = write_rows(team, s, rows, 0, &num_tokens);

  // Prefill takes what the decodes left of the budget, in order of admission. chunks[] starts behind
  // marks[] of the running.
  const int budget = s.max_step_tokens - num_tokens;
  int32_t* chunks = s.marks + s.max_running;
  for (int i = team.rank; i < s.num_running; i += team.size) chunks[i] = 0;
  team.sync();
  const int wanted = scan_each(
      team, s.num_running, 0,
      [&](int i) {
        const Sequence& q = s.sequences[s.running[i]];
        return is_prefill(q) && !is_paused(s, s.running[i]) ? remaining_of(q) : 0;
      },
      [&](int i, int at) {
        const int remaining = remaining_of(s.sequences[s.running[i]]);
        const int left = max_of(budget - at, 0);
        chunks[i] = s.chunked_prefill || left >= remaining ? min_of(remaining, left) : 0;
      });
  int num_rows = decodes;
  if (wanted) {
    mark(team, s, [&](int i) { return chunks[i]; });
    num_rows = write_rows(team, s, rows, decodes, &num_tokens);
  }
  int sums = 0;  // two in one: there are at most 1,024 rows
  for (int i = team.rank; i < num_rows; i += team.size) {
    sums += (rows[i].flags & kRowSample) != 0;
    sums += (rows[i].flags & kRowAlternatives) != 0 ? 1 << 16 : 0;
  }
  sums = team.sum(sums);
  if (team.leader()) {
    plan.num_rows = num_rows;
    plan.num_decode_rows = decodes;
    plan.num_tokens = num_tokens;
    plan.num_sampled = sums & 0xffff;
    plan.num_with_alternatives = sums >> 16;
    plan.graph = 0;
    if (num_rows) {
      plan.step = ++s.step;
      plan.graph = 1;
      while (plan.graph < s.num_graphs - 1 && s.graph_tokens[plan.graph] < num_tokens) plan.graph++;
    }
  }
  team.sync();
}

}  // namespace blinkbed
