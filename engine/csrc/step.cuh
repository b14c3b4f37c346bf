// One turn of the scheduler, and what it shows of itself in the window.
#pragma once
#include "scheduler.cuh"

namespace blinkbed {

constexpr uint64_t kShowEveryNs = 1000000;  // the heartbeat's period while nothing happens

// free + used == total, and every page has one owner. Debug builds, after each step.
BB_FN bool pages_add_up(Scheduler& s) {
  for (int i = 0; i < s.num_pages; i++) s.marks[i] = 0;
  int owned = s.num_free_pages;
  for (int i = 0; i < s.num_free_pages; i++) s.marks[s.free_pages[i]]++;
  for (int seq = 0; seq < s.num_seqs; seq++) {
    owned += s.sequences[seq].num_pages;
    for (int k = 0; k < s.sequences[seq].num_pages; k++)
      s.marks[s.block_tables[size_t(s.max_pages_per_seq) * seq + k]]++;
  }
  for (int i = 0; i < s.num_pages; i++)
    if (s.marks[i] != 1) return false;
  return owned == s.num_pages;
}

BB_FN void show_progress(const Team& team, Scheduler& s, uint64_t now) {
  if (team.leader()) {
    s.heartbeat++;
    s.shown_ns = now;
  }
  team.sync();
  for (int p = team.rank; p < s.num_ports; p += team.size) {
    Port& port = s.ports[p];
    Counters& c = counters_of(port);
    c.num_running = uint32_t(s.num_running);
    c.num_waiting = uint32_t(s.num_waiting);
    c.free_pages = uint32_t(s.num_free_pages);
    c.total_pages = uint32_t(s.num_pages);
    const PortMemory memory = port_memory(s, p);
    *memory.counters() = c;
    Progress* progress = memory.progress();
    progress->state = s.state;
    progress->error = s.error;
    progress->clock_ns = now;
    progress->picked_up = port.next_sequence - 1;
    store_release(&progress->token_tail, port.token_tail);
    store_release(&progress->heartbeat, s.heartbeat);
  }
  team.sync();
}

BB_FN bool has_halted(const Scheduler& s) {
  return s.state == EngineState_STOPPED || s.state == EngineState_FATAL;
}

// Is there anything for a full turn to do? A few loads from the window, cheap enough to spin on.
BB_FN bool anything_new(Scheduler& s) {
  if (s.num_running || s.num_waiting || s.num_ended || s.num_suspects) return true;
  if (load_acquire(&s.command) != Command_RUN) return true;
  for (int p = 0; p < s.num_ports; p++) {
    const Port& port = s.ports[p];
    const PortMemory memory = port_memory(s, p);
    if (load_acquire(&memory.control()->session) != port.session) return true;
    if (is_rung(port, port.next_sequence, load_acquire(memory.doorbell(port.next_sequence))))
      return true;
  }
  return false;
}

BB_FN void decide_state(Scheduler& s, uint32_t command) {
  const int live = s.num_running + s.num_waiting + s.num_ended + s.num_suspects;
  const bool stops = command == Command_STOP && !samples_in_flight(s);
  if (stops || (command == Command_DRAIN && live == 0))
    s.state = EngineState_STOPPED;
  else if (command != Command_RUN)
    s.state = EngineState_DRAINING;
  else
    s.state = live ? EngineState_RUNNING : EngineState_IDLE;
  if (s.debug && !pages_add_up(s)) {
    s.error = SchedulerError_PAGE_ACCOUNTING;
    s.state = EngineState_FATAL;
  }
}

// A pass that the device planned itself, before its times are overwritten.
BB_FN void record_step(Scheduler& s, const Plan& plan, uint64_t now) {
  if (!s.timeline || !s.planned_ns) return;
  s.timeline[s.num_recorded++ % kTimelineSteps] =
      StepRecord{s.returned_ns, s.planned_ns, now, plan.step, plan.num_tokens, plan.num_rows};
}

// Where the time between two turns belongs: to the step that ran, or to idleness.
BB_FN void account_time(Scheduler& s, uint64_t now) {
  const bool stepped = s.planned_ns != 0;
  for (int p = 0; p < s.num_ports; p++) {
    Counters& c = counters_of(s.ports[p]);
    if (stepped) {
      c.num_steps++;
      c.step_ns += now - s.planned_ns;
    } else if (s.returned_ns) {
      c.idle_ns += now - s.returned_ns;
    }
  }
  s.returned_ns = now;
}

// A pass that the host launched, by the device's clock: between two of them it was idle, or waited for the
// host although there was work.
BB_FN void account_pass(Scheduler& s, uint64_t started_ns, uint64_t ended_ns) {
  const uint64_t between = s.returned_ns && started_ns > s.returned_ns ? started_ns - s.returned_ns : 0;
  for (int p = 0; p < s.num_ports; p++) {
    Counters& c = counters_of(s.ports[p]);
    c.num_steps++;
    c.step_ns += ended_ns - started_ns;
    (s.had_work ? c.gap_ns : c.idle_ns) += between;
  }
  s.returned_ns = ended_ns;
}

// A finished pass: its tokens go out.
struct Done {
  Plan* plan;
  const Row* rows;
  const Result* results;
  const Result* alternatives;  // [num_rows][kMaxLogprobs]
};

// Publish `done` (null plan: nothing), poll, admit, plan. Leaves the next pass in plan and rows;
// plan.num_rows == 0 if there is none. times_itself: the pass begins where this turn ends, and ends where
// the next one begins.
BB_FN void scheduler_turn(const Team& team, Scheduler& s, const Done& done, Plan& plan, Row* rows,
                          bool times_itself) {
  const uint32_t command = read_word(team, &s.command);
  if (done.plan) publish(team, s, *done.plan, done.rows, done.results, done.alternatives);
  poll(team, s, command);
  admit(team, s);
  plan_step(team, s, plan, rows);
  const uint64_t now = team.broadcast(clock_ns());
  if (team.leader()) {
    decide_state(s, command);
    s.planned_ns = plan.num_rows ? now : 0;
    if (s.state != EngineState_IDLE || !s.busy_ns) s.busy_ns = now;
    if (plan.num_rows && times_itself)
      for (int p = 0; p < s.num_ports; p++) counters_of(s.ports[p]).gap_ns += now - s.returned_ns;
    if (has_halted(s)) plan.num_rows = 0;
  }
  team.sync();
  show_progress(team, s, now);
}

// A turn between two passes, of which the later one is not planned before the earlier one is known.
BB_FN void scheduler_step(const Team& team, Scheduler& s, Plan& plan, Row* rows,
                          const Result* results) {
  if (team.leader()) {
    const uint64_t now = clock_ns();
    record_step(s, plan, now);
    account_time(s, now);
  }
  team.sync();
  scheduler_turn(team, s, Done{&plan, rows, results, s.alternatives}, plan, rows, true);
}

}  // namespace blinkbed
