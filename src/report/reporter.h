// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells people about a run: feeds what listens to spans, and writes lines and files at each step's end.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/messages.h"
#include "deeptide/config.h"
#include "deeptide/engine.h"
#include "deeptide/profiler.h"
#include "device/memory/memory.h"
#include "report/comms_table.h"
#include "report/flops/profiler_names.h"
#include "report/flops/roofline.h"
#include "report/limit.h"
#include "report/monitors.h"
#include "report/recordings.h"
#include "report/step_clock.h"
#include "report/step_rate.h"
#include "trace/recorder.h"

namespace deeptide::report {

/// Who reports.
struct Reporting {
  int rank = 0;             // of the world
  std::vector<int> ranks;   // of the world, that train together
  bool has_stages = false;  // whether these are one stage of a pipeline
  std::string clock;        // names the kernel whose clock times are read from
  c10::Device device = c10::kCPU;
  c10::ScalarType dtype = c10::kFloat;
  int64_t train_batch = 0;
  std::shared_ptr<trace::Recorder> recorder;
  std::shared_ptr<device::Ledger> ledger;
  std::function<std::string()> slow_link;           // as LimitFacts says
  std::function<std::vector<MemoryLine>()> memory;  // as Engine::memory
  bool is_first() const { return rank == 0; }
};

/// A step that has ended.
struct StepEnd {
  const StepOutcome& outcome;
  const std::vector<Hyperparameters>& groups;
  int64_t global_samples;
  int64_t skipped_steps;
};

class Reporter {
 public:
  Reporter(const Config& config, Reporting place);
  ~Reporter();

  /// Opens the record of the run.
  void start(const std::string& summary, const std::vector<MemoryLine>& forecast);
  void begin_forward(int64_t tokens, int64_t step);
  /// Shows spans to torch.profiler where it has begun.
  void follow_profiler();

  /// Whether ranks exchange their losses at the end of this step.
  bool wants_loss(int64_t step) const { return wants_events() || (config_.report().steps_per_print && is_due(step)); }
  /// The mean over the ranks in the last exchange; NaN: they had none, or did not exchange it.
  double loss() const { return loss_; }
  /// Sets it to what another stage of a pipeline has computed.
  void note_loss(double loss) { loss_ = loss; }
  /// The times of the last step that has ended, for the other ranks; zeros if measuring the machine has disturbed it.
  const StepTimes& own_times() const { return told_; }
  const StepTimes& last_times() const { return last_; }
  void note(const std::vector<comm::Verdict>& verdicts, int64_t step);
  /// Between two phases.
  void end_step(const StepEnd& end);

  std::string limit() const;
  std::vector<CollectiveLine> collectives() const;
  std::string collectives_text() const;
  void keep_events() { keeps_events_ = true; }
  std::vector<MonitorEvent> take_events() { return std::exchange(events_, {}); }
  void leave_profile_to_program() { profiles_ = false; }
  /// Goes on for `before`, whose engine was rebuilt after `step` steps.
  struct Wishes {
    bool keeps_events, profiles;
  };
  Wishes wishes() const { return {keeps_events_, profiles_}; }
  void resume(Wishes before, int64_t step);

 private:
  bool is_due(int64_t step) const;
  bool wants_events() const { return keeps_events_ || csv_ || record_ || is_watched_; }
  std::vector<MonitorEvent> events_of(const StepEnd& end) const;
  LimitFacts limit_facts() const;
  std::string late_text() const;
  void write_breakdown() const;
  void record(const StepEnd& end, const std::vector<MonitorEvent>& events);
  struct Counted {
    double flops = 0.0, bytes = 0.0;
  };
  static Counted sum_of(const std::vector<OperatorUse>& uses);
  void count_operators(int64_t step);
  void measure_machine(int64_t step);
  void write_profile(int64_t step, const std::vector<OperatorUse>& uses, const MachinePeak& peak) const;
  void follow_watchers();
  void show(const StepEnd& end) const;
  const Config& config_;
  const Reporting place_;
  const bool breaks_down_;
  bool profiles_;
  bool is_watched_ = false;  // `deeptide top` looks at this rank
  bool is_timed_ = false;    // the clock listens: for the breakdown, or for who watches
  bool keeps_events_ = false;
  StepClock clock_;
  StepTimes last_;                 // step
  StepTimes told_;                 // of that, to the other ranks
  bool is_disturbed_ = false;      // the step under way
  std::vector<StepTimes> window_;  // sums by team's index since the last line
  int64_t window_steps_ = 0;
  StepTimes own_window_;
  int64_t own_window_steps_ = 0;
  int64_t seen_steps_ = 0;
  std::string last_limit_;
  double loss_ = 0.0;
  StepRate rate_;
  int64_t tokens_ = 0;  // of this rank in the step under way
  std::optional<CommsTable> comms_;
  std::optional<CsvFiles> csv_;
  std::optional<RunRecord> record_;
  std::vector<MonitorEvent> events_;
  std::unique_ptr<ProfilerNames> names_;
  Recordings recordings_;
  std::unique_ptr<OperatorCounter> counter_;
  std::optional<MachinePeak> peak_;
  std::optional<Roofline> roofline_;
  double counted_s_ = 0.0;  // computing in the counted step
  Counted counted_;         // by the last step whose operators were counted
};

/// Facts for the line of a step that its outcome lacks.
struct LineFacts {
  double loss = 0.0;        // NaN: unknown
  int64_t total_steps = 0;  // of the schedule; 0: unknown
  StepRate::Rates rates;    // since the last line
};

/// The line of every `steps_per_print` steps: "step 10/1,000 | loss 2.3 | lr 0.001 | norm 0.52 | 7.2 samples/s | 0:12
/// left".
std::string step_line(const StepEnd& end, const LineFacts& facts);

}  // namespace deeptide::report
