// The scheduler in virtual time: the same source, a clock that is set, and no waiting. What a pass takes
// comes from a profile (paced.cuh), what the path around it takes from measured distributions.
#define BB_VIRTUAL_CLOCK
#include <algorithm>
#include <deque>

#include "load.h"
#include "paced.cuh"
#include "step.cuh"

using namespace blinkbed;

namespace {

// engine/simulate/costs.py: COSTS
enum CostKind { kSettle, kTurn, kLaunch, kGap, kExtra, kNumCosts };

class Costs {
 public:
  // samples: u64[kNumCosts][count], equally likely; in_order: those of the steps of one run instead.
  Costs(const uint64_t* samples, uint64_t count, bool in_order, uint64_t seed)
      : samples_(samples, samples + kNumCosts * count),
        count_(count),
        in_order_(in_order),
        state_(seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull) {}

  uint64_t of_step(uint64_t step, CostKind kind) {
    return samples_[size_t(kind) * count_ + (in_order_ ? std::min(step, count_ - 1) : draw())];
  }

 private:
  uint64_t draw() {  // xorshift64* (Vigna, 2016)
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return ((state_ * 0x2545F4914F6CDD1Dull) >> 32) * count_ >> 32;
  }

  std::vector<uint64_t> samples_;
  uint64_t count_;
  bool in_order_;
  uint64_t state_;
};

}  // namespace

// engine/simulate/library.py: Figures
struct Figures {
  uint64_t num_requests, num_failed, num_delayed, num_tokens, num_steps, num_preemptions, num_rows;
  uint64_t first_arrival_ns, last_token_ns, busy_ns, gap_ns, idle_ns;
};

// One engine, one client, one path between them.
class Simulation {
 public:
  Simulation(Scheduler* s, const Pace* pace, Costs costs, uint64_t link_ns, bool ends_by_eos)
      : load(*s, link_ns, ends_by_eos), s_(*s), pace_(*pace), costs_(std::move(costs)) {}
  virtual ~Simulation() = default;

  // A round of the path's loop. False: something waits that can never be served.
  virtual bool step() = 0;
  virtual int turns_per_step() const = 0;

  Figures figures() const {
    Figures f = totals_;
    f.num_requests = load.num_finished;
    f.num_failed = load.num_failed;
    f.num_delayed = load.num_delayed;
    f.num_tokens = load.num_tokens;
    f.first_arrival_ns = load.first_arrival_ns;
    f.last_token_ns = load.last_token_ns;
    f.num_preemptions = counters_of(s_.ports[0]).num_preemptions;
    return f;
  }

  Load load;

 protected:
  // The pass's length; its samples are in results.
  uint64_t pass(const Plan& plan, const Row* rows, Result* results) {
    load.sample(plan, rows, results);
    const uint64_t length_ns = pace_of(pace_, plan, rows) + cost(kExtra);
    totals_.num_steps++;
    totals_.num_rows += uint64_t(plan.num_rows);
    totals_.busy_ns += length_ns;
    return length_ns;
  }

  // Of the step that comes next.
  uint64_t cost(CostKind kind) { return costs_.of_step(totals_.num_steps, kind); }

  bool sleep_until_work() {
    if (load.is_over()) return true;
    if (!load.has_next()) return false;
    if (load.next_ns() > now_ns_) now_ns_ = load.next_ns();
    return true;
  }

  Scheduler& s_;
  const Pace pace_;
  Costs costs_;
  Figures totals_{};
  uint64_t now_ns_ = 1;
};

namespace {

// The device's scheduler node follows each pass, and launches the next one.
class Persistent : public Simulation {
 public:
  using Simulation::Simulation;
  int turns_per_step() const override { return 1; }

  bool step() override {
    load.post_until(now_ns_);
    virtual_now_ns = now_ns_;
    scheduler_step(Team{}, s_, *s_.plan, s_.rows, s_.results);
    load.take_tokens(now_ns_);
    if (!s_.plan->num_rows) {
      const uint64_t before_ns = now_ns_;
      const bool goes_on = sleep_until_work();
      totals_.idle_ns += now_ns_ - before_ns;
      return goes_on;
    }
    const uint64_t turn_ns = cost(kTurn);
    totals_.gap_ns += turn_ns;
    now_ns_ += turn_ns + pass(*s_.plan, s_.rows, s_.results);
    return true;
  }
};

// engine/control/host_driven.py, with virtual clocks for the host (now_ns_) and the device.
class HostDriven : public Simulation {
 public:
  HostDriven(Scheduler* s, const Pace* pace, Costs costs, uint64_t link_ns, bool ends_by_eos, int depth)
      : Simulation(s, pace, std::move(costs), link_ns, ends_by_eos), sets_(size_t(depth)) {
    for (StepSet& one : sets_) {
      one.rows.resize(size_t(s->max_running));
      one.results.resize(size_t(s->max_running));
      free_.push_back(&one);
    }
  }
  int turns_per_step() const override { return 2; }

  bool step() override {
    StepSet* done = free_.empty() ? settle() : nullptr;
    bool planned = turn(done);
    if (!planned && !under_way_.empty()) planned = turn(settle());
    return planned || !under_way_.empty() || sleep_until_work();
  }

 private:
  struct StepSet {
    Plan plan{};
    std::vector<Row> rows;
    std::vector<Result> results;
    uint64_t step = 0, end_ns = 0;
  };

  StepSet* settle() {
    StepSet* one = under_way_.front();
    under_way_.pop_front();
    if (now_ns_ < one->end_ns) now_ns_ = one->end_ns;
    now_ns_ += costs_.of_step(one->step, kSettle);
    free_.push_back(one);
    return one;
  }

  bool turn(StepSet* done) {
    StepSet& next = *free_.front();
    load.post_until(now_ns_);
    virtual_now_ns = now_ns_;
    Done finished{};
    if (done) finished = {&done->plan, done->rows.data(), done->results.data(), s_.alternatives};
    scheduler_turn(Team{}, s_, finished, next.plan, next.rows.data(), false);
    if (done) had_work_ = s_.num_running + s_.num_waiting > 0;
    load.take_tokens(now_ns_);
    now_ns_ += cost(kTurn);
    if (!next.plan.num_rows) return false;
    launch(next);
    free_.pop_front();
    under_way_.push_back(&next);
    return true;
  }

  void launch(StepSet& one) {
    one.step = totals_.num_steps;
    now_ns_ += cost(kLaunch);
    const uint64_t start_ns = (now_ns_ > device_ns_ ? now_ns_ : device_ns_) + cost(kGap);
    (had_work_ ? totals_.gap_ns : totals_.idle_ns) += start_ns - device_ns_;
    one.end_ns = device_ns_ = start_ns + pass(one.plan, one.rows.data(), one.results.data());
  }

  std::vector<StepSet> sets_;
  std::deque<StepSet*> free_, under_way_;
  uint64_t device_ns_ = 1;  // when the device is through with what it was given
  bool had_work_ = false;
};

}  // namespace

// depth: passes that the host keeps under way, 0 for the persistent path. costs: as Costs takes them.
extern "C" Simulation* bb_simulate_open(Scheduler* s, const Pace* pace, const uint64_t* costs,
                                        uint64_t num_costs, int in_order, int depth, uint64_t seed,
                                        uint64_t link_ns, int ends_by_eos) {
  Costs path_costs(costs, num_costs, in_order != 0, seed);
  if (depth == 0) return new Persistent(s, pace, std::move(path_costs), link_ns, ends_by_eos != 0);
  return new HostDriven(s, pace, std::move(path_costs), link_ns, ends_by_eos != 0, depth);
}

extern "C" void bb_simulate_close(Simulation* simulation) { delete simulation; }

// More requests, in order of arrival; runs as far as they allow. 0: give more, 1: all are through,
// -1: a request that waits can never be served.
extern "C" int bb_simulate_feed(Simulation* simulation, const uint64_t* arrivals_ns, const int32_t* prompts,
                                const int32_t* outputs, uint64_t n, int is_last) {
  Load& load = simulation->load;
  load.feed(arrivals_ns, prompts, outputs, n, is_last != 0);
  while (!load.is_over()) {
    if (!load.knows_enough(simulation->turns_per_step())) return 0;
    if (!simulation->step()) return -1;
  }
  return 1;
}

extern "C" void bb_simulate_figures(const Simulation* simulation, Figures* out) {
  *out = simulation->figures();
}

// which: 0 TTFT, 1 TPOT, 2 ITL. out: count, mean, max, then a value for each of the shares; ns.
extern "C" void bb_simulate_times(const Simulation* simulation, int which, const double* shares, int n,
                                  double* out) {
  const Load& load = simulation->load;
  const Histogram& times = which == 0 ? load.ttft : which == 1 ? load.tpot : load.itl;
  out[0] = double(times.count());
  out[1] = times.mean();
  out[2] = double(times.max());
  for (int i = 0; i < n; i++) out[3 + i] = times.quantile(shares[i]);
}
