// The scheduler compiled for the host: property tests and host-driven control paths call it directly.
#include "packet.cuh"
#include "scripted.cuh"
#include "step.cuh"

using namespace blinkbed;

extern "C" void bb_scheduler_step(Scheduler* s) {
  scheduler_step(Team{}, *s, *s->plan, s->rows, s->results);
}

// A turn of a host-driven path. `done` and `next` may be the same set (taking turns) or two (asynchronous
// batching); is_done: there is a finished pass in `done`, whose device times are started_ns and ended_ns.
// results: as in the answer (packet.cuh), alternatives behind them.
extern "C" void bb_turn(Scheduler* s, int is_done, Plan* done, const Row* done_rows,
                        const Result* results, uint64_t started_ns, uint64_t ended_ns, Plan* next,
                        Row* next_rows) {
  if (is_done) account_pass(*s, started_ns, ended_ns);
  const Done finished{is_done ? done : nullptr, done_rows, results, results + s->max_running};
  scheduler_turn(Team{}, *s, finished, *next, next_rows, false);
  if (is_done) s->had_work = s->num_running + s->num_waiting > 0;
}

static uint32_t* pack_adjustments(const Scheduler& s, const Row& row, uint32_t* to) {
  const Record& record = record_of(s, row.seq);
  const int n = num_adjustment_words(record.num_stop_token_ids, record.num_logit_bias);
  to[0] = record.num_stop_token_ids;
  to[1] = record.num_logit_bias;
  memcpy(to + 2, record_words(s, row.seq), sizeof(uint32_t) * size_t(n));
  return to + 2 + n;
}

// The packet for a planned pass; returns its length. There is room for the longest one.
extern "C" uint64_t bb_pack(Scheduler* s, const Plan* plan, const Row* rows, uint8_t* packet) {
  const PacketParts parts = packet_parts(*s, plan->num_rows, plan->num_tokens);
  memcpy(packet, plan, sizeof(Plan));
  memcpy(packet + parts.rows, rows, sizeof(Row) * size_t(plan->num_rows));
  const size_t table_bytes = sizeof(int32_t) * size_t(s->max_pages_per_seq);
  int32_t* tokens = reinterpret_cast<int32_t*>(packet + parts.tokens);
  uint32_t* adjustments = reinterpret_cast<uint32_t*>(packet + parts.adjustments);
  for (int i = 0; i < plan->num_rows; i++) {
    const Row& row = rows[i];
    memcpy(packet + parts.tables + table_bytes * size_t(i),
           s->block_tables + size_t(s->max_pages_per_seq) * size_t(row.seq), table_bytes);
    memcpy(tokens + row.query_start, history_of(*s, row.seq) + row.first_position,
           sizeof(int32_t) * size_t(num_prompt_of(row)));
    if (brings_adjustments(row)) adjustments = pack_adjustments(*s, row, adjustments);
  }
  return uint64_t(reinterpret_cast<uint8_t*>(adjustments) - packet);
}

// Length of the longest packet, bytes.
extern "C" uint64_t bb_packet_bytes(Scheduler* s) {
  return packet_parts(*s, s->max_running, s->max_step_tokens).adjustments +
         sizeof(uint32_t) * size_t(kMostAdjustmentWords) * size_t(s->max_running);
}

extern "C" void bb_apply_packet(Scheduler* s, const uint8_t* packet) {
  apply_packet(Team{}, *s, packet);
}

// The heartbeat while nothing happens.
extern "C" void bb_show(Scheduler* s) {
  const uint64_t now = clock_ns();
  if (now - s->shown_ns > kShowEveryNs) show_progress(Team{}, *s, now);
}

extern "C" int bb_anything_new(Scheduler* s) { return anything_new(*s); }

extern "C" void bb_scripted_pass(Scheduler* s) {
  scripted_pass(Team{}, *s, *s->plan, s->rows, s->results);
}

extern "C" float bb_philox_uniform(uint64_t seed, uint32_t position) {
  return philox_uniform(seed, position);
}
