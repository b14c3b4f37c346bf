// The scripted model: a byte-level vocabulary whose answer is the prompt's own tokens after the last SEP
// (the whole prompt without BOS if there is none), then EOS, and so on again if EOS is ignored. It
// makes every stream exactly predictable. It is sure of what it says: biases change nothing, and the only
// alternative is the token itself.
#pragma once
#include "ring.cuh"

namespace blinkbed {

constexpr int kScriptedBos = 256, kScriptedEos = 257, kScriptedSep = 258;

BB_FN void find_script(const Scheduler& s, int seq) {
  Sequence& q = s.sequences[seq];
  const int32_t* prompt = history_of(s, seq);
  int start = q.num_prompt;
  while (start > 0 && prompt[start - 1] != kScriptedSep) start--;
  if (start == 0 && prompt[0] == kScriptedBos) start = 1;
  q.script_start = start;
  q.script_length = q.num_prompt - start;
}

BB_FN void scripted_pass(const Team& team, const Scheduler& s, const Plan& plan, const Row* rows,
                         Result* results) {
  for (int i = team.rank; i < plan.num_rows; i += team.size) {
    if (!(rows[i].flags & kRowSample)) continue;
    Sequence& q = s.sequences[rows[i].seq];
    if (q.script_length < 0) find_script(s, rows[i].seq);
    int32_t* history = history_of(s, rows[i].seq);
    const int end = rows[i].first_position + rows[i].num_tokens;
    const int at = (end - q.num_prompt) % (q.script_length + 1);
    results[i].token = at < q.script_length ? history[q.script_start + at] : kScriptedEos;
    results[i].logprob = 0.0f;
    history[end] = results[i].token;
    if (rows[i].flags & kRowAlternatives) {
      Result* alternatives = s.alternatives + kMaxLogprobs * i;
      alternatives[0] = results[i];
      alternatives[1].token = -1;
    }
  }
  team.sync();
}

}  // namespace blinkbed
