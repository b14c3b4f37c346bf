// Poll: sessions, indices, cancels and doorbells of each port; records are judged and accepted or refused.
#pragma once
#include "sequences.cuh"

namespace blinkbed {

// A new SmartNIC on this port: forget, without a word, what the earlier one asked for. Every slot skips a
// generation, so that whatever the earlier one posted or cancelled last, even if it arrives late, names
// none of the new one's requests.
BB_FN void change_session(const Team& team, Scheduler& s, int p, uint32_t session) {
  Port& port = s.ports[p];
  for (int slot = team.rank; slot < s.slots_per_port; slot += team.size) {
    const int seq = p * s.slots_per_port + slot;
    Sequence& q = s.sequences[seq];
    if (port.session) q.generation++;
    if (q.state != SlotState_FREE) {
      finish(q, FinishReason_CANCELLED);
      q.terminal_written = Terminal_WRITTEN;
      q.finished_ns = clock_ns();
      if (q.state == SlotState_SUSPECT || q.state == SlotState_ENDED) q.state = SlotState_FREE;
    }
    show_status(s, seq);
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
  const uint32_t session = read_word(team, &control->session);
  // Samples in flight (asynchronous batching) are settled first: their slots would not be free yet.
  const bool changes = session != port.session;
  const bool waits = changes && team.broadcast(port.in_flight) > 0;
  if (changes && !waits) change_session(team, s, p, session);
  if (waits && team.leader()) port.room = 0;
  if (!waits && team.leader()) {
    const uint64_t index = load_acquire(&control->consumer_index);
    if (index >= port.consumer_index && index <= port.token_tail)
      port.consumer_index = index;
    else if (index > port.token_tail)
      counters_of(port).indices_refused++;
    port.room = s.token_ring_entries - int(port.token_tail - port.consumer_index) - port.in_flight;
  }
  team.sync();
}

// Returns how many were cancelled. As with records, a changed count does not prove the words before it
// visible, so they are looked at again until torn_timeout_ns after it.
BB_FN int read_cancels(const Team& team, Scheduler& s, int p, uint64_t now) {
  Port& port = s.ports[p];
  const PortMemory memory = port_memory(s, p);
  const uint64_t count = read_word(team, &memory.control()->cancel_count);
  const bool is_new = count != port.cancel_count;
  if (!is_new && now >= port.cancels_until_ns) return 0;
  int cancelled = 0;
  auto look = [&](int seq) {
    Sequence& q = s.sequences[seq];
    if (port_of(s, seq) != p || q.finish_reason != FinishReason_NONE) return;
    if (!is_cancelled(memory, slot_of(s, seq), q.generation)) return;
    finish(q, FinishReason_CANCELLED);
    cancelled++;
  };
  for (int i = team.rank; i < s.num_running; i += team.size) look(s.running[i]);
  for (int i = team.rank; i < s.num_waiting; i += team.size) look(s.waiting[i]);
  const int total = team.sum(cancelled);
  if (team.leader()) {
    if (is_new) port.cancels_until_ns = now + s.torn_timeout_ns;
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
    q.min_total = q.num_prompt + int(r.min_tokens < r.max_tokens ? r.min_tokens : r.max_tokens);
    q.priority = r.priority;
    q.flags = r.flags;
    q.num_entries = 1 + max_of(r.num_logprobs, 0);
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

// A terminal for whoever posted to this slot, without a run. It speaks to the generation that the poster
// must have used, unless the record is intact and names another, which then is the slot's.
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
    q.terminal_written = q.num_preemptions = 0;
    q.state = SlotState_ENDED;
    s.ended[s.num_ended++] = seq;
    Counters& c = counters_of(s.ports[port_of(s, seq)]);
    (reason == FinishReason_CANCELLED ? c.cancels : c.records_rejected)++;
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
  // read_cancels looks at live slots only: a cancel may have come before its record was taken.
  const bool cancelled =
      team.leader() && is_cancelled(port_memory(s, p), slot, record_of(s, seq).generation);
  if (team.broadcast(int(cancelled)) && reason == FinishReason_NONE) reason = FinishReason_CANCELLED;
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
    const uint64_t word = read_word(team, memory.doorbell(sequence));
    const int slot = int(word & 0xffff);
    if (!is_rung(port, sequence, word)) return;
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
    cancelled += read_cancels(team, s, p, now);
  }
  if (command == Command_STOP) end_all(team, s, FinishReason_ERROR_SHUTDOWN);
  if (cancelled || command == Command_STOP) retire(team, s);
  if (s.num_suspects) examine_suspects(team, s, now, command);
  for (int p = 0; p < s.num_ports; p++) answer_doorbells(team, s, p, now, command);
  flush_ended(team, s);
}

}  // namespace blinkbed
