// Publish: the tokens of the last pass go to the token rings, sequences that end leave.
#pragma once
#include "sequences.cuh"

namespace blinkbed {

BB_FN bool is_stop_id(const Scheduler& s, const Sequence& q, int seq, int token) {
  if (!(q.flags & kRequestIgnoreEos))
    for (int i = 0; i < s.num_eos; i++)
      if (s.eos[i] == token) return true;
  const uint32_t* ids = stop_ids_of(s, seq);
  const int n = int(record_of(s, seq).num_stop_token_ids);
  for (int i = 0; i < n; i++)
    if (int(ids[i]) == token) return true;
  return false;
}

// The token of `row` is known: extend the sequence, decide whether it ends. With a further sample of it
// planned already (asynchronous batching) the last token is held back until that one is discarded: the
// terminal entry frees the slot.
BB_FN void settle(const Scheduler& s, const Row& row, const Result& result) {
  Sequence& q = s.sequences[row.seq];
  q.pending--;
  if (q.finish_reason != FinishReason_NONE) {  // ended meanwhile: the sample is discarded
    if (q.terminal_written == Terminal_HELD && !q.pending) q.terminal_written = Terminal_RELEASED;
    return;
  }
  if (result.token < 0 || result.token >= s.vocab_size) return finish(q, FinishReason_ERROR_MODEL);
  history_of(s, row.seq)[q.num_tokens++] = result.token;
  if (!q.first_token_ns) q.first_token_ns = clock_ns();
  if (q.num_tokens > q.min_total && is_stop_id(s, q, row.seq, result.token))
    finish(q, FinishReason_STOP);
  else if (q.num_tokens >= q.max_total)
    finish(q, FinishReason_LENGTH);
  if (q.finish_reason == FinishReason_NONE) return;
  q.terminal_written = q.pending ? Terminal_HELD : Terminal_NOW;
  q.held_logprob = result.logprob;
}

// How many alternatives of a settled row go out now: with a token that became known just now, also if that
// one is held back, so that nobody has to keep them.
BB_FN int num_alternatives(const Scheduler& s, const Row& row, const Result* own) {
  if (!(row.flags & kRowAlternatives)) return 0;
  if (row.first_position + row.num_tokens != s.sequences[row.seq].num_tokens - 1) return 0;
  int n = 0;
  while (n < row.num_logprobs && own[n].token >= 0 && own[n].token < s.vocab_size) n++;
  return n;
}

// Does a settled row's sequence have a token to publish?
BB_FN bool speaks(const Sequence& q) {
  return q.finish_reason == FinishReason_NONE || q.terminal_written == Terminal_NOW ||
         q.terminal_written == Terminal_RELEASED;
}

// Append the step's tokens to the token rings, each behind its alternatives, and settle their sequences.
// alternatives: [num_rows][kMaxLogprobs], looked at for the rows that want them.
BB_FN void publish(const Team& team, Scheduler& s, Plan& plan, const Row* rows, const Result* results,
                   const Result* alternatives) {
  const int n = plan.num_rows;
  auto samples = [&](int i) { return (rows[i].flags & kRowSample) != 0; };
  for (int p = 0; p < s.num_ports; p++) {
    Port& port = s.ports[p];
    const PortMemory memory = port_memory(s, p);
    const uint64_t tail = port.token_tail;
    int sums = 0;  // two in one, each below 2^15: entries claimed, and alternatives written
    for (int i = team.rank; i < n; i += team.size)
      if (samples(i) && port_of(s, rows[i].seq) == p) {
        sums += s.sequences[rows[i].seq].num_entries;
        settle(s, rows[i], results[i]);
      }
    team.sync();
    const int written = scan_each(
        team, n, 0,
        [&](int i) {
          if (!samples(i) || port_of(s, rows[i].seq) != p) return 0;
          return num_alternatives(s, rows[i], alternatives + kMaxLogprobs * i) +
                 speaks(s.sequences[rows[i].seq]);
        },
        [&](int i, int at) {
          Sequence& q = s.sequences[rows[i].seq];
          const Result* own = alternatives + kMaxLogprobs * i;
          const int num_own = num_alternatives(s, rows[i], own);
          for (int k = 0; k < num_own; k++)
            write_entry(memory, tail + at + k, slot_of(s, rows[i].seq), q.generation, own[k].token,
                        own[k].logprob, EntryKind_ALTERNATIVE, FinishReason_NONE);
          sums += num_own << 16;
          if (!speaks(q)) return;
          Result said = results[i];
          if (q.terminal_written == Terminal_RELEASED)
            said = Result{history_of(s, rows[i].seq)[q.num_tokens - 1], q.held_logprob};
          if (q.terminal_written) close_status(s, rows[i].seq);
          write_entry(memory, tail + at + num_own, slot_of(s, rows[i].seq), q.generation, said.token,
                      said.logprob, EntryKind_TOKEN, q.finish_reason);
          if (q.terminal_written) q.terminal_written = Terminal_WRITTEN;  // later samples stay silent
        });
    sums = team.sum(sums);
    if (team.leader()) {
      port.token_tail += written;
      port.in_flight -= sums & 0xffff;
      counters_of(port).generation_tokens += written - (sums >> 16);
    }
    team.sync();
  }
  int over = 0;
  for (int i = team.rank; i < n; i += team.size) over += is_over(s.sequences[rows[i].seq]);
  over = team.sum(over);
  if (team.leader()) plan.num_rows = 0;
  team.sync();
  if (over) retire(team, s);
}

}  // namespace blinkbed
