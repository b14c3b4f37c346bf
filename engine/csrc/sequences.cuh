// Sequences on the device: what may be planned, who goes first, KV pages, the lists, and ending.
#pragma once
#include "ring.cuh"

namespace blinkbed {

BB_FN int min_of(int a, int b) { return a < b ? a : b; }
BB_FN int max_of(int a, int b) { return a > b ? a : b; }
BB_FN int port_of(const Scheduler& s, int seq) { return seq >> s.slot_bits; }
BB_FN int slot_of(const Scheduler& s, int seq) { return seq & (s.slots_per_port - 1); }
BB_FN int pages_for(const Scheduler& s, int tokens) { return (tokens + s.page_size - 1) >> s.page_bits; }

// Tokens that exist once all planned samples are known.
BB_FN int length_of(const Sequence& q) { return q.num_tokens + q.pending; }
BB_FN int remaining_of(const Sequence& q) { return length_of(q) - q.num_computed; }
BB_FN bool may_plan(const Sequence& q) {
  return q.finish_reason == FinishReason_NONE && length_of(q) < q.max_total && remaining_of(q) > 0;
}
BB_FN bool is_decode(const Sequence& q) { return may_plan(q) && remaining_of(q) == 1; }
BB_FN bool is_prefill(const Sequence& q) { return may_plan(q) && remaining_of(q) > 1; }

// The token ring of its port is too full for what it samples.
BB_FN bool is_paused(const Scheduler& s, int seq) {
  return s.ports[port_of(s, seq)].room < s.sequences[seq].num_entries;
}

// Is `a` served after `b`?
BB_FN bool served_after(const Sequence& a, const Sequence& b) {
  return a.priority != b.priority ? a.priority > b.priority : a.arrival > b.arrival;
}

BB_FN void show_status(const Scheduler& s, int seq) {
  const Sequence& q = s.sequences[seq];
  SlotStatus* status = port_memory(s, port_of(s, seq)).status(slot_of(s, seq));
  status->picked_up_ns = q.picked_up_ns;
  status->admitted_ns = q.admitted_ns;
  status->first_token_ns = q.first_token_ns;
  status->finished_ns = q.finished_ns;
  status->num_preemptions = q.num_preemptions;
  status->num_generated = uint32_t(q.num_tokens - q.num_prompt);
  status->state = q.finish_reason == FinishReason_NONE ? q.state : uint32_t(SlotState_FREE);
  store_release(&status->generation, q.generation);
}

// ---- KV pages ----------------------------------------------------------------------------------------
// Pages [q.num_pages, num_pages) of the sequence come from the top of the stack. The caller checked that
// they are there.
BB_FN void grant_pages(const Team& team, Scheduler& s, int seq, int num_pages) {
  Sequence& q = s.sequences[seq];
  const int held = q.num_pages, top = s.num_free_pages - 1;
  int32_t* table = s.block_tables + size_t(s.max_pages_per_seq) * seq;
  for (int i = team.rank; i < num_pages - held; i += team.size)
    table[held + i] = s.free_pages[top - i];
  team.sync();
  if (team.leader()) {
    s.num_free_pages -= num_pages - held;
    q.num_pages = num_pages;
  }
  team.sync();
}

BB_FN void push_pages(const Scheduler& s, int seq, int at) {
  Sequence& q = s.sequences[seq];
  const int32_t* table = s.block_tables + size_t(s.max_pages_per_seq) * seq;
  for (int k = 0; k < q.num_pages; k++) s.free_pages[at + k] = table[k];
  q.num_pages = 0;
}

// ---- The two lists -----------------------------------------------------------------------------------
// `waiting` is sorted, the next to be served last.
BB_FN void enqueue(const Team& team, Scheduler& s, int seq) {
  const Sequence& q = s.sequences[seq];
  const int n = s.num_waiting;
  int at = 0;  // how many are served after it; a newcomer usually is the last
  if (n && served_after(s.sequences[s.waiting[0]], q)) {
    int after = 0;
    for (int i = team.rank; i < n; i += team.size) after += served_after(s.sequences[s.waiting[i]], q);
    at = team.sum(after);
  }
#if defined(BB_PARALLEL)
  for (int end = n; end > at; end -= team.size) {
    const int i = end - 1 - team.rank;
    const int value = i >= at ? s.waiting[i] : 0;
    team.sync();
    if (i >= at) s.waiting[i + 1] = value;
    team.sync();
  }
#else
  memmove(s.waiting + at + 1, s.waiting + at, size_t(n - at) * sizeof(int32_t));
#endif
  team.sync();  // all have read num_waiting
  if (team.leader()) {
    s.waiting[at] = seq;
    s.num_waiting = n + 1;
  }
  team.sync();
}

// Keep, in order, the members for which keep(seq) holds; returns the new length.
template <class Keep>
BB_FN int compact(const Team& team, int32_t* list, int n, Keep keep) {
  int kept = 0;
  for (int first = 0; first < n; first += team.size) {
    const int i = first + team.rank;
    const int seq = i < n ? list[i] : -1;
    const int value = i < n && keep(seq) ? 1 : 0;
    int total;
    const int offset = team.scan(value, &total);
    team.sync();
    if (value) list[kept + offset] = seq;
    team.sync();
    kept += total;
  }
  team.sync();  // all have read n: the leader may now change where it came from
  return kept;
}

// ---- Ending ------------------------------------------------------------------------------------------
BB_FN void finish(Sequence& q, uint32_t reason) {
  if (q.finish_reason == FinishReason_NONE) q.finish_reason = reason;
}

BB_FN bool is_over(const Sequence& q) { return q.finish_reason != FinishReason_NONE && !q.pending; }

// Before the terminal entry is written, so that who sees the entry may read the status.
BB_FN void close_status(const Scheduler& s, int seq) {
  s.sequences[seq].finished_ns = clock_ns();
  show_status(s, seq);
}

// Take the sequences that are over out of both lists, give their pages back; those whose terminal entry
// went out with their last token are free, the others wait in `ended`.
BB_FN void retire(const Team& team, Scheduler& s) {
  auto leaves = [&](int seq) { return is_over(s.sequences[seq]); };
  const int free_pages = scan_each(
      team, s.num_running, s.num_free_pages,
      [&](int i) { return leaves(s.running[i]) ? s.sequences[s.running[i]].num_pages : 0; },
      [&](int i, int at) { push_pages(s, s.running[i], at); });
  int32_t* lists[2] = {s.running, s.waiting};
  const int lengths[2] = {s.num_running, s.num_waiting};
  int ended = s.num_ended, kept[2];
  for (int k = 0; k < 2; k++) {
    const int32_t* list = lists[k];
    ended = scan_each(
        team, lengths[k], ended,
        [&](int i) { return leaves(list[i]) && !s.sequences[list[i]].terminal_written ? 1 : 0; },
        [&](int i, int at) { s.ended[at] = list[i]; });
    for (int i = team.rank; i < lengths[k]; i += team.size)
      if (leaves(list[i])) {
        Sequence& q = s.sequences[list[i]];
        q.state = q.terminal_written ? SlotState_FREE : SlotState_ENDED;
      }
    team.sync();
    // A freed slot's sequence keeps its finish_reason until it is claimed again: leaves() still holds.
    kept[k] = compact(team, lists[k], lengths[k], [&](int seq) { return !leaves(seq); });
  }
  if (team.leader()) {
    s.num_free_pages = free_pages;
    s.num_running = kept[0];
    s.num_waiting = kept[1];
    s.num_ended = ended;
  }
  team.sync();
}

// Write terminal entries without a token, as far as each port's log has room.
BB_FN void flush_ended(const Team& team, Scheduler& s) {
  if (s.num_ended == 0) return;
  for (int p = 0; p < s.num_ports; p++) {
    Port& port = s.ports[p];
    const PortMemory memory = port_memory(s, p);
    const int room = port.room;
    const uint64_t tail = port.token_tail;
    const int written = scan_each(
        team, s.num_ended, 0, [&](int i) { return port_of(s, s.ended[i]) == p ? 1 : 0; },
        [&](int i, int at) {
          if (at >= room) return;
          Sequence& q = s.sequences[s.ended[i]];
          close_status(s, s.ended[i]);
          write_entry(memory, tail + at, slot_of(s, s.ended[i]), q.generation, -1, 0.0f,
                      EntryKind_END, q.finish_reason);
          q.terminal_written = 1;
          q.state = SlotState_FREE;
        });
    if (team.leader()) {
      port.token_tail += min_of(written, room);
      port.room -= min_of(written, room);
    }
  }
  const int left = compact(team, s.ended, s.num_ended, [&](int seq) {
    return s.sequences[seq].state == SlotState_ENDED;
  });
  if (team.leader()) s.num_ended = left;
  team.sync();
}

}  // namespace blinkbed
