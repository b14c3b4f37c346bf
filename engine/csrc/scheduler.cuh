// The scheduler: one source for the GPU's scheduling node, the simulator, and the host-driven paths.
// No heap, no exceptions, no STL. engine/reference.py is its readable twin; equal traces, equal plans.
//
// A step: publish what the last forward pass sampled, poll the ring, admit, plan the next pass.
//
// Rules that keep it right
// - A sequence ends once: finish_reason is set once, its terminal entry is written once, and only then is
//   its slot FREE. Pages go back when no planned pass may still write to them (pending == 0).
// - Order of service: (priority, arrival). A preempted sequence keeps its arrival, so the oldest of the
//   most urgent always advances, and every sequence fits the pool alone: no livelock.
// - Room in the token ring is claimed when a sample is planned, so publishing never waits; a full ring
//   pauses the sequences of its port and no others.
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

// ---- KV pages ------------------------------------------------------------------------------------------
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

// ---- The two lists -------------------------------------------------------------------------------------
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
#if defined(__CUDACC__)
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
  return kept;
}

// ---- Ending ----------------------------------------------------------------------------------------------
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

// ---- Publish ---------------------------------------------------------------------------------------------
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

// The token of `row` is known: extend the sequence, decide whether it ends.
BB_FN void settle(const Scheduler& s, const Row& row, const Result& result) {
  Sequence& q = s.sequences[row.seq];
  q.pending--;
  if (q.finish_reason != FinishReason_NONE) return;  // ended meanwhile: the sample is discarded
  if (result.token < 0 || result.token >= s.vocab_size) return finish(q, FinishReason_ERROR_MODEL);
  history_of(s, row.seq)[q.num_tokens++] = result.token;
  if (!q.first_token_ns) q.first_token_ns = clock_ns();
  if (q.num_tokens >= q.min_total && is_stop_id(s, q, row.seq, result.token))
    finish(q, FinishReason_STOP);
  else if (q.num_tokens >= q.max_total)
    finish(q, FinishReason_LENGTH);
  if (q.finish_reason != FinishReason_NONE) q.terminal_written = 1;
}

// Append the step's tokens to the token rings and settle their sequences.
BB_FN void publish(const Team& team, Scheduler& s, Plan& plan, const Row* rows, const Result* results) {
  const int n = plan.num_rows;
  auto samples = [&](int i) { return (rows[i].flags & kRowSample) != 0; };
  for (int p = 0; p < s.num_ports; p++) {
    Port& port = s.ports[p];
    const PortMemory memory = port_memory(s, p);
    const uint64_t tail = port.token_tail;
    int claimed = 0;
    for (int i = team.rank; i < n; i += team.size)
      if (samples(i) && port_of(s, rows[i].seq) == p) {
        claimed++;
        settle(s, rows[i], results[i]);
      }
    team.sync();
    const int written = scan_each(
        team, n, 0,
        [&](int i) {
          const Sequence& q = s.sequences[rows[i].seq];
          const bool spoken = q.finish_reason == FinishReason_NONE || q.terminal_written == 1;
          return samples(i) && port_of(s, rows[i].seq) == p && spoken ? 1 : 0;
        },
        [&](int i, int at) {
          Sequence& q = s.sequences[rows[i].seq];
          if (q.terminal_written) close_status(s, rows[i].seq);
          write_entry(memory, tail + at, slot_of(s, rows[i].seq), q.generation, results[i].token,
                      results[i].logprob, EntryKind_TOKEN, q.finish_reason);
          if (q.terminal_written) q.terminal_written = 2;  // a later sample of it stays silent
        });
    const int settled = team.sum(claimed);
    if (team.leader()) {
      port.token_tail += written;
      port.in_flight -= settled;
      counters_of(port).generation_tokens += written;
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

// ---- Poll ------------------------------------------------------------------------------------------------
// A new SmartNIC on this port: forget, without a word, what the earlier one asked for.
BB_FN void change_session(const Team& team, Scheduler& s, int p, uint32_t session) {
  Port& port = s.ports[p];
  for (int slot = team.rank; slot < s.slots_per_port; slot += team.size) {
    const int seq = p * s.slots_per_port + slot;
    Sequence& q = s.sequences[seq];
    if (q.state == SlotState_FREE) continue;
    finish(q, FinishReason_CANCELLED);
    q.terminal_written = 2;
    if (q.state == SlotState_SUSPECT || q.state == SlotState_ENDED) q.state = SlotState_FREE;
  }
  team.sync();
  retire(team, s);
  auto live = [&](int seq) { return s.sequences[seq].state != SlotState_FREE; };
  const int ended = compact(team, s.ended, s.num_ended, live);
  const int suspects = compact(team, s.suspects, s.num_suspects, live);
  if (team.leader()) {
    s.num_ended = ended;
    s.num_suspects = suspects;
    port.session = session;
    port.consumer_index = port.token_tail;
    port.cancel_count = 0;
    Progress* progress = port_memory(s, p).progress();
    store_release(&progress->token_tail, port.token_tail);
    store_release(&progress->picked_up, port.next_sequence - 1);
    store_release(&progress->session_ack, session);
  }
  team.sync();
}

BB_FN void read_control(const Team& team, Scheduler& s, int p) {
  Port& port = s.ports[p];
  const Control* control = port_memory(s, p).control();
  const uint32_t session = team.broadcast(load_acquire(&control->session));
  if (session != port.session) change_session(team, s, p, session);
  if (team.leader()) {
    const uint64_t index = load_acquire(&control->consumer_index);
    if (index >= port.consumer_index && index <= port.token_tail)
      port.consumer_index = index;
    else if (index > port.token_tail)
      counters_of(port).indices_refused++;
    port.room = s.token_ring_entries - int(port.token_tail - port.consumer_index) - port.in_flight;
  }
  team.sync();
}

// Returns how many were cancelled.
BB_FN int read_cancels(const Team& team, Scheduler& s, int p) {
  Port& port = s.ports[p];
  const PortMemory memory = port_memory(s, p);
  const uint64_t count = team.broadcast(load_acquire(&memory.control()->cancel_count));
  if (count == port.cancel_count) return 0;
  int cancelled = 0;
  for (int slot = team.rank; slot < s.slots_per_port; slot += team.size) {
    Sequence& q = s.sequences[p * s.slots_per_port + slot];
    const bool alive = q.state == SlotState_WAITING || q.state == SlotState_RUNNING;
    if (!alive || q.finish_reason != FinishReason_NONE) continue;
    if (load_acquire(memory.cancel_word(slot)) != q.generation) continue;
    finish(q, FinishReason_CANCELLED);
    cancelled++;
  }
  const int total = team.sum(cancelled);
  if (team.leader()) {
    port.cancel_count = count;
    counters_of(port).cancels += total;
  }
  team.sync();
  return total;
}

// An intact, sound record: claim the slot and let it wait.
BB_FN void accept(const Team& team, Scheduler& s, int seq) {
  Sequence& q = s.sequences[seq];
  const Record& r = record_of(s, seq);
  const uint32_t* prompt = prompt_of(s, seq);
  int32_t* history = history_of(s, seq);
  for (int i = team.rank; i < int(r.num_prompt_tokens); i += team.size) history[i] = int32_t(prompt[i]);
  if (team.leader()) {
    q.state = SlotState_WAITING;
    q.generation = r.generation;
    q.num_prompt = q.num_tokens = int(r.num_prompt_tokens);
    q.num_computed = q.pending = q.num_pages = 0;
    q.max_total = q.num_prompt + int(r.max_tokens);
    q.min_total = q.num_prompt + min_of(int(r.min_tokens), int(r.max_tokens));
    q.priority = r.priority;
    q.flags = r.flags;
    q.finish_reason = FinishReason_NONE;
    q.terminal_written = q.num_preemptions = 0;
    q.script_length = -1;
    q.arrival = ++s.arrivals;
    q.admitted_ns = q.first_token_ns = q.finished_ns = 0;
    Counters& c = counters_of(s.ports[port_of(s, seq)]);
    c.records_accepted++;
    c.prompt_tokens += r.num_prompt_tokens;
    c.pickup_ns += clock_ns() - q.picked_up_ns;
    show_status(s, seq);
  }
  team.sync();
  enqueue(team, s, seq);
}

// A terminal error for whoever posted to this slot. It speaks to the generation that the poster must have
// used, unless the record is intact and names another; the slot's generation moves on only in step.
BB_FN void refuse(const Team& team, Scheduler& s, int seq, uint32_t reason) {
  if (team.leader()) {
    Sequence& q = s.sequences[seq];
    const Record& r = record_of(s, seq);
    const bool named = reason != FinishReason_ERROR_TORN && reason != FinishReason_ERROR_EPOCH &&
                       reason != FinishReason_ERROR_SESSION;
    q.generation = named ? r.generation : q.generation + 1;
    q.num_prompt = q.num_tokens = q.pending = q.num_pages = 0;
    q.admitted_ns = q.first_token_ns = 0;
    q.finish_reason = reason;
    q.terminal_written = 0;
    q.state = SlotState_ENDED;
    s.ended[s.num_ended++] = seq;
    counters_of(s.ports[port_of(s, seq)]).records_rejected++;
  }
  team.sync();
}

// Look at the record of a SUSPECT slot. False while it is not whole and its time is not up.
BB_FN bool examine(const Team& team, Scheduler& s, int seq, uint64_t now, uint32_t command) {
  Sequence& q = s.sequences[seq];
  const int p = port_of(s, seq), slot = slot_of(s, seq);
  uint32_t reason = copy_record(team, s, port_memory(s, p), slot, seq, q.sequence);
  if (reason == FinishReason_ERROR_TORN) {
    if (team.leader()) counters_of(s.ports[p]).records_torn++;
    if (now < q.deadline_ns) return false;
  } else {
    reason = judge_record(team, s, s.ports[p], slot, seq);
  }
  if (reason == FinishReason_NONE && command != Command_RUN) reason = FinishReason_ERROR_SHUTDOWN;
  if (reason == FinishReason_NONE)
    accept(team, s, seq);
  else
    refuse(team, s, seq, reason);
  return true;
}

BB_FN void examine_suspects(const Team& team, Scheduler& s, uint64_t now, uint32_t command) {
  for (int i = 0; i < s.num_suspects; i++) examine(team, s, s.suspects[i], now, command);
  const int left = compact(team, s.suspects, s.num_suspects, [&](int seq) {
    return s.sequences[seq].state == SlotState_SUSPECT;
  });
  if (team.leader()) s.num_suspects = left;
  team.sync();
}

// Take up to max_pickups doorbells, in their order.
BB_FN void answer_doorbells(const Team& team, Scheduler& s, int p, uint64_t now, uint32_t command) {
  Port& port = s.ports[p];
  const PortMemory memory = port_memory(s, p);
  for (int k = 0; k < s.max_pickups; k++) {
    const uint64_t sequence = port.next_sequence;
    const uint64_t word = team.broadcast(load_acquire(memory.doorbell(sequence)));
    const int slot = int(word & 0xffff);
    const bool rung = uint32_t(word >> 32) == uint32_t(sequence) &&
                      ((word >> 16) & 0xffff) == (port.session & 0xffff) && port.session != 0;
    if (!rung) return;
    const int seq = p * s.slots_per_port + slot;
    const bool usable = slot < s.slots_per_port && s.sequences[seq].state == SlotState_FREE;
    team.sync();
    if (team.leader()) {
      port.next_sequence = sequence + 1;
      if (usable) {
        Sequence& q = s.sequences[seq];
        q.state = SlotState_SUSPECT;
        q.sequence = sequence;
        q.deadline_ns = now + s.torn_timeout_ns;
        q.picked_up_ns = now;
      } else {
        counters_of(port).doorbells_refused++;
      }
    }
    team.sync();
    if (!usable || examine(team, s, seq, now, command)) continue;
    if (team.leader()) s.suspects[s.num_suspects++] = seq;
    team.sync();
  }
}

BB_FN void end_all(const Team& team, Scheduler& s, uint32_t reason) {
  for (int i = team.rank; i < s.num_running; i += team.size)
    finish(s.sequences[s.running[i]], reason);
  for (int i = team.rank; i < s.num_waiting; i += team.size)
    finish(s.sequences[s.waiting[i]], reason);
  team.sync();
}

BB_FN void poll(const Team& team, Scheduler& s, uint32_t command) {
  const uint64_t now = team.broadcast(clock_ns());
  int cancelled = 0;
  for (int p = 0; p < s.num_ports; p++) {
    read_control(team, s, p);
    cancelled += read_cancels(team, s, p);
  }
  if (command == Command_STOP) end_all(team, s, FinishReason_ERROR_SHUTDOWN);
  if (cancelled || command == Command_STOP) retire(team, s);
  if (s.num_suspects) examine_suspects(team, s, now, command);
  for (int p = 0; p < s.num_ports; p++) answer_doorbells(team, s, p, now, command);
  flush_ended(team, s);
}

// ---- Admit -----------------------------------------------------------------------------------------------
template <class Value>
BB_FN int sum_running(const Team& team, const Scheduler& s, Value value) {
  int sum = 0;
  for (int i = team.rank; i < s.num_running; i += team.size)
    sum += value(s.sequences[s.running[i]]);
  return team.sum(sum);
}

BB_FN bool needs_page(const Scheduler& s, const Sequence& q) {
  return is_decode(q) && pages_for(s, length_of(q)) > q.num_pages;
}

// Back to the queue; its KV is recomputed later. Its tokens stay known and are not published again.
BB_FN void preempt(const Team& team, Scheduler& s) {
  int victim = s.running[0];
  for (int i = 1; i < s.num_running; i++)
    if (served_after(s.sequences[s.running[i]], s.sequences[victim])) victim = s.running[i];
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

// Pages for the decodes that cross into a new one, taking them from the last served if need be.
// Precondition of a preemption: no planned pass is in flight (pending == 0 everywhere).
BB_FN void secure_decode_pages(const Team& team, Scheduler& s) {
  auto missing = [&](const Sequence& q) { return needs_page(s, q) ? 1 : 0; };
  int needed = sum_running(team, s, missing);
  while (needed > s.num_free_pages) {
    preempt(team, s);
    needed = sum_running(team, s, missing);
  }
  if (needed == 0) return;
  const int top = s.num_free_pages;
  const int taken = scan_each(
      team, s.num_running, 0,
      [&](int i) { return missing(s.sequences[s.running[i]]); },
      [&](int i, int at) {
        Sequence& q = s.sequences[s.running[i]];
        s.block_tables[size_t(s.max_pages_per_seq) * s.running[i] + q.num_pages++] =
            s.free_pages[top - 1 - at];
      });
  if (team.leader()) s.num_free_pages = top - taken;
  team.sync();
}

// Waiting sequences join in order while a place, pages for all their known tokens, and budget are left.
BB_FN void admit(const Team& team, Scheduler& s) {
  if (team.leader()) s.preempted = 0;
  team.sync();
  secure_decode_pages(team, s);
  if (s.preempted) return;  // what was just freed belongs to those that run
  int tokens = sum_running(team, s, [](const Sequence& q) { return max_of(remaining_of(q), 0); });
  while (s.num_waiting && s.num_running < s.max_running && tokens < s.max_step_tokens) {
    const int seq = s.waiting[s.num_waiting - 1];
    Sequence& q = s.sequences[seq];
    const int pages = pages_for(s, q.num_tokens);
    if (pages > s.num_free_pages) break;
    tokens += q.num_tokens;
    team.sync();
    grant_pages(team, s, seq, pages);
    if (team.leader()) {
      s.num_waiting--;
      s.running[s.num_running++] = seq;
      q.state = SlotState_RUNNING;
      if (!q.admitted_ns) q.admitted_ns = clock_ns();
    }
    team.sync();
  }
}

// ---- Plan ------------------------------------------------------------------------------------------------
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
  row.flags = 0;
  row.uniform = 0;
  q.num_computed += num_tokens;
  if (q.num_computed < length_of(q)) return;
  row.flags = kRowSample | (r.num_logprobs >= 0 ? kRowLogprobs : 0);
  if (length_of(q) + 1 < q.min_total) row.flags |= kRowSuppressStop;
  if (r.temperature > 0) row.uniform = philox_uniform(r.seed, uint32_t(length_of(q)));
  q.pending++;
}

// marks[i] = tokens of running[i] in this step, 0 for none: those in `kind` whose port has room for the
// sample that they end with.
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
    const int wanted = scan_each(
        team, s.num_running, 0, [&](int i) { return mine(i) && samples(i) ? 1 : 0; },
        [&](int i, int at) { s.marks[i] = at < room ? tokens(i) : 0; });
    if (team.leader()) {
      const int granted = min_of(wanted, room);
      port.room -= granted;
      port.in_flight += granted;
      counters_of(port).ring_stalls += wanted - granted;
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
        return is_prefill(q) ? remaining_of(q) : 0;
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
  int sampled = 0;
  for (int i = team.rank; i < num_rows; i += team.size) sampled += (rows[i].flags & kRowSample) != 0;
  sampled = team.sum(sampled);
  if (team.leader()) {
    plan.num_rows = num_rows;
    plan.num_decode_rows = decodes;
    plan.num_tokens = num_tokens;
    plan.num_sampled = sampled;
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
