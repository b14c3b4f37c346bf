// Admit: pages for the decodes, preemption, and who joins those that run.
#pragma once
#include "sequences.cuh"

namespace blinkbed {

template <class Value>
BB_FN int sum_running(const Team& team, const Scheduler& s, Value value) {
  int sum = 0;
  for (int i = team.rank; i < s.num_running; i += team.size) sum += value(s.running[i]);
  return team.sum(sum);
}

BB_FN bool needs_page(const Scheduler& s, int seq) {
  const Sequence& q = s.sequences[seq];
  return is_decode(q) && pages_for(s, length_of(q)) > q.num_pages && !is_paused(s, seq);
}

// Does `a` give way before `b`? Those that pause do first, then the last served.
BB_FN bool gives_way(const Scheduler& s, int a, int b) {
  const bool paused = is_paused(s, a);
  return paused != is_paused(s, b) ? paused : served_after(s.sequences[a], s.sequences[b]);
}

// Back to the queue; its KV is recomputed later. Its tokens stay known and are not published again.
BB_FN void preempt(const Team& team, Scheduler& s) {
  int victim = s.running[0];
  for (int i = 1; i < s.num_running; i++)
    if (gives_way(s, s.running[i], victim)) victim = s.running[i];
  team.sync();
  const int left = compact(team, s.running, s.num_running, [&](int seq) { return seq != victim; });
  if (team.leader()) {
    Sequence& q = s.sequences[victim];
    const int pages = q.num_pages;
    push_pages(s, victim, s.num_free_pages);
    s.num_free_pages += pages;
    s.num_running = left;
    s.preempted++;
    q.num_computed = 0;
    q.num_preemptions++;
    q.state = SlotState_WAITING;
    counters_of(s.ports[port_of(s, victim)]).num_preemptions++;
  }
  team.sync();
  enqueue(team, s, victim);
}

// Is the token of a planned sample unknown yet? Then nothing may be preempted: what is recomputed must be
// known. Never so on the persistent path.
BB_FN bool samples_in_flight(const Scheduler& s) {
  int in_flight = 0;
  for (int p = 0; p < s.num_ports; p++) in_flight += s.ports[p].in_flight;
  return in_flight > 0;
}

BB_FN void ask_to_drain(const Team& team, Scheduler& s) {
  team.sync();
  if (team.leader()) s.must_drain = 1;
  team.sync();
}

// Pages for the decodes that cross into a new one, taking them from others if need be.
BB_FN void secure_decode_pages(const Team& team, Scheduler& s) {
  auto missing = [&](int seq) { return needs_page(s, seq) ? 1 : 0; };
  int needed = sum_running(team, s, missing);
  while (needed > s.num_free_pages) {
    if (samples_in_flight(s)) return ask_to_drain(team, s);
    preempt(team, s);
    needed = sum_running(team, s, missing);
  }
  if (needed == 0) return;
  const int top = s.num_free_pages;
  const int taken = scan_each(
      team, s.num_running, 0,
      [&](int i) { return missing(s.running[i]); },
      [&](int i, int at) {
        Sequence& q = s.sequences[s.running[i]];
        s.block_tables[size_t(s.max_pages_per_seq) * s.running[i] + q.num_pages++] =
            s.free_pages[top - 1 - at];
      });
  if (team.leader()) s.num_free_pages = top - taken;
  team.sync();
}

// For the next to be admitted: places and pages of those that pause, as far as it takes.
BB_FN void make_way(const Team& team, Scheduler& s, int num_pages) {
  int full = 0;
  for (int p = 0; p < s.num_ports; p++) full += s.ports[p].room <= kMaxLogprobs;
  if (!full) return;
  int paused = sum_running(team, s, [&](int seq) { return is_paused(s, seq) ? 1 : 0; });
  for (; paused && (s.num_running >= s.max_running || num_pages > s.num_free_pages); paused--) {
    if (samples_in_flight(s)) return ask_to_drain(team, s);
    preempt(team, s);
  }
}

// The index in `waiting` of the next to be served below `end`, -1 if all pause.
BB_FN int next_waiting(const Scheduler& s, int end) {
  do end--;
  while (end >= 0 && is_paused(s, s.waiting[end]));
  return end;
}

// Waiting sequences join in order while a place, pages for all their known tokens, and budget are left.
BB_FN void admit_waiting(const Team& team, Scheduler& s) {
  int tokens = sum_running(team, s, [&](int seq) {
    return is_paused(s, seq) ? 0 : max_of(remaining_of(s.sequences[seq]), 0);
  });
  int next = next_waiting(s, s.num_waiting), admitted = 0, last = 0;
  if (next < 0 || tokens >= s.max_step_tokens) return;
  make_way(team, s, pages_for(s, s.sequences[s.waiting[next]].num_tokens));
  if (s.must_drain) return;
  const int n = s.num_waiting;
  next = next_waiting(s, n);
  for (; next >= 0 && s.num_running < s.max_running && tokens < s.max_step_tokens; admitted++) {
    const int seq = s.waiting[next];
    Sequence& q = s.sequences[seq];
    const int pages = pages_for(s, q.num_tokens);
    if (pages > s.num_free_pages) break;
    tokens += q.num_tokens;
    team.sync();
    grant_pages(team, s, seq, pages);
    if (team.leader()) {
      s.running[s.num_running++] = seq;
      q.state = SlotState_RUNNING;
      if (!q.admitted_ns) q.admitted_ns = clock_ns();
    }
    team.sync();
    last = next;
    next = next_waiting(s, next);
  }
  if (!admitted) return;
  int left = last;
  if (admitted < n - last)  // some pause between them
    left = compact(team, s.waiting, n, [&](int seq) {
      return s.sequences[seq].state == SlotState_WAITING;
    });
  if (team.leader()) s.num_waiting = left;
  team.sync();
}

BB_FN void admit(const Team& team, Scheduler& s) {
  if (team.leader()) s.preempted = s.must_drain = 0;
  team.sync();
  secure_decode_pages(team, s);
  // What was just freed belongs to those that run.
  if (!s.preempted && !s.must_drain) admit_waiting(team, s);
}

}  // namespace blinkbed
