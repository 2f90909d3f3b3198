// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides what listens, and when lines and files are written.
#include "report/reporter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "base/log.h"
#include "base/text.h"
#include "trace/flight_log.h"

namespace deeptide {

const char* text(MemoryRole role) {
  static constexpr const char* kNames[] = {"parameters", "gradients", "optimizer states", "gathered peak",
                                           "communication"};
  return kNames[static_cast<int>(role)];
}

namespace report {

using nlohmann::json;
using trace::Phase;

namespace {

constexpr int64_t kCountedStep = 2;  // the first one also prepares
constexpr const char* kSamples = "Train/Samples/";

void add(StepTimes& sum, const StepTimes& times) {
  for (auto part : {&StepTimes::total, &StepTimes::between, &StepTimes::forward, &StepTimes::backward, &StepTimes::step,
                    &StepTimes::waiting, &StepTimes::backward_waiting, &StepTimes::files, &StepTimes::optimizer}) {
    sum.*part += times.*part;
  }
}

StepTimes over(StepTimes sum, int64_t steps) {
  for (auto part : {&StepTimes::total, &StepTimes::between, &StepTimes::forward, &StepTimes::backward, &StepTimes::step,
                    &StepTimes::waiting, &StepTimes::backward_waiting, &StepTimes::files, &StepTimes::optimizer}) {
    sum.*part /= static_cast<float>(std::max<int64_t>(steps, 1));
  }
  return sum;
}

json times_json(const StepTimes& t) {
  return {{"total", t.total},       {"data", t.between},        {"forward", t.forward},
          {"backward", t.backward}, {"step", t.step},           {"waiting", t.waiting},
          {"files", t.files},       {"optimizer", t.optimizer}, {"computing", t.computing()}};
}

/// Steps of a schedule that states them; otherwise 0.
int64_t total_steps(const SchedulerConfig& scheduler) {
  return std::visit(
      [](const auto& each) -> int64_t {
        if constexpr (requires { each.total_steps; }) return each.total_steps;
        return 0;
      },
      scheduler);
}

/// NaN has no JSON.
json number(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }

}  // namespace

Reporter::Reporter(const Config& config, Reporting place)
    : config_(config),
      place_(std::move(place)),
      breaks_down_(config.report().wall_clock_breakdown || config.jsonl_monitor().enabled),
      profiles_(config.flops_profiler().enabled),
      window_(place_.ranks.size()),
      recordings_(config.timeline(), place_.recorder,
                  {place_.rank, static_cast<int>(place_.ranks.size()), place_.clock}) {
  if (place_.is_first()) {  // files first: who listens when one cannot be made would listen on without a reporter
    if (config.csv_monitor().enabled) csv_.emplace(config.csv_monitor());
    if (config.jsonl_monitor().enabled) record_.emplace(config.jsonl_monitor());
  } else {
    keeps_events_ =
        config.csv_monitor().enabled || config.jsonl_monitor().enabled;  // the first rank needs their losses
  }
  if (breaks_down_) place_.recorder->add(clock_);
  is_timed_ = breaks_down_;
  if (config.comms_logger().enabled) {
    place_.recorder->add(comms_.emplace(config.comms_logger()));
  }
}

Reporter::~Reporter() {
  if (names_) place_.recorder->remove(*names_);
  if (is_timed_) place_.recorder->remove(clock_);
  if (!comms_) return;
  place_.recorder->remove(*comms_);
  if (const std::string text = collectives_text(); place_.is_first() && !text.empty()) log(LogLevel::info, text);
}

void Reporter::start(const std::string& summary, const std::vector<MemoryLine>& forecast) {
  recordings_.follow(0);
  count_operators(0);
  if (!record_) return;
  json memory = json::object();
  for (const MemoryLine& line : forecast) {
    memory[deeptide::text(line.role)] = line.predicted_bytes + line.off_device_bytes;
  }
  record_->write({{"kind", "start"},
                  {"summary", summary},
                  {"config", config_.text()},
                  {"origin", config_.origin()},
                  {"decisions", config_.decisions()},
                  {"world", place_.ranks.size()},
                  {"train_batch", place_.train_batch},
                  {"forecast", memory}});
}

void Reporter::resume(Wishes before, int64_t step) {
  keeps_events_ = before.keeps_events;
  profiles_ = before.profiles;
  counter_.reset();  // start() took the next step for the first
  recordings_.forget();
  count_operators(step);
  recordings_.follow(step);
}

void Reporter::follow_profiler() {
  if (ProfilerNames::is_wanted() == (names_ != nullptr)) return;
  if (names_) {
    place_.recorder->remove(*names_);
    names_.reset();
  } else {
    names_ = std::make_unique<ProfilerNames>();
    place_.recorder->add(*names_);
  }
}

void Reporter::begin_forward(int64_t tokens, int64_t step) {
  tokens_ += tokens;
  follow_profiler();
  place_.recorder->enter(Phase::forward, step);
}

void Reporter::note(const std::vector<comm::Verdict>& verdicts, int64_t step) {
  recordings_.note_exchange(step);
  double sum = 0.0;
  int count = 0;
  for (const comm::Verdict& verdict : verdicts) {
    if (std::isnan(verdict.loss)) continue;
    sum += verdict.loss;
    ++count;
  }
  loss_ = count > 0 ? sum / count : std::nan("");
  const auto is_untimed = [](const comm::Verdict& verdict) { return verdict.times.total <= 0.0f; };
  if (!is_timed_ || std::any_of(verdicts.begin(), verdicts.end(), is_untimed)) return;
  for (size_t i = 0; i < verdicts.size(); ++i) add(window_[i], verdicts[i].times);
  ++window_steps_;
}

bool Reporter::is_due(int64_t step) const { return step % config_.report().steps_per_print.value_or(1) == 0; }

void Reporter::end_step(const StepEnd& end) {
  const int64_t step = end.outcome.step;
  if (is_timed_) {
    last_ = clock_.take();
    told_ = std::exchange(is_disturbed_, false) ? StepTimes() : last_;
    if (told_.total > 0.0f) {
      add(own_window_, last_);
      ++own_window_steps_;
    }
  }
  ++seen_steps_;
  count_operators(step);
  recordings_.follow(step);
  if (place_.is_first()) {
    rate_.end_step(end.global_samples);
    const auto events = wants_events() ? events_of(end) : std::vector<MonitorEvent>();
    if (keeps_events_) events_.insert(events_.end(), events.begin(), events.end());
    if (csv_) csv_->write(events);
    if (record_) record(end, events);
    if (config_.report().steps_per_print && is_due(step)) {
      log(LogLevel::info, step_line(end, {loss_, total_steps(config_.scheduler()), rate_.take()}));
    }
    if (is_due(step)) write_breakdown();
  }
  if (is_watched_) show(end);
  follow_watchers();
  tokens_ = 0;
  if (!is_timed_ || !is_due(step)) return;
  last_limit_ = limit();
  own_window_ = {};
  own_window_steps_ = window_steps_ = 0;
  std::fill(window_.begin(), window_.end(), StepTimes());
}

std::vector<MonitorEvent> Reporter::events_of(const StepEnd& end) const {
  std::vector<MonitorEvent> events;
  const auto say = [&](const char* name, double value) {
    events.push_back({std::string(kSamples) + name, value, end.global_samples});
  };
  if (!std::isnan(loss_)) say("train_loss", loss_);
  say("lr", end.outcome.lr);
  if (config_.precision().scales_loss()) say("loss_scale", end.outcome.loss_scale);
  say("grad_norm", end.outcome.grad_norm);
  if (!config_.report().wall_clock_breakdown) return events;
  say("elapsed_time_ms_forward", 1e3 * last_.forward);
  say("elapsed_time_ms_backward", 1e3 * last_.backward);
  say("elapsed_time_ms_backward_inner", 1e3 * (last_.backward - last_.backward_waiting));
  say("elapsed_time_ms_backward_allreduce", 1e3 * last_.backward_waiting);
  say("elapsed_time_ms_step", 1e3 * last_.step);
  return events;
}

LimitFacts Reporter::limit_facts() const {
  LimitFacts facts{.times = {},
                   .ranks = place_.ranks,
                   .has_stages = place_.has_stages,
                   .slow_link = place_.slow_link ? place_.slow_link() : ""};
  for (const StepTimes& sum : window_) facts.times.push_back(over(sum, window_steps_));
  if (!roofline_) return facts;
  facts.memory_bound = roofline_->memory_bound;
  facts.bytes_per_s = roofline_->bytes_per_s;
  facts.triad = peak_->bytes_per_s;
  facts.flops_share = peak_->share_of(2.0 * static_cast<double>(roofline_->macs), counted_s_);
  return facts;
}

std::string Reporter::limit() const { return window_steps_ == 0 ? last_limit_ : find_limit(limit_facts()).text; }

void Reporter::write_breakdown() const {
  if (config_.report().wall_clock_breakdown) {
    const StepTimes mean = over(own_window_, own_window_steps_);
    log(LogLevel::info,
        format_text(
            "time (ms) | fwd: {:.2f} | bwd: {:.2f} | bwd_inner: {:.2f} | bwd_allreduce: {:.2f} | step: {:.2f} | "
            "data: {:.2f} | waiting: {:.2f} | files: {:.2f} | optimizer: {:.2f}",
            1e3 * mean.forward, 1e3 * mean.backward, 1e3 * (mean.backward - mean.backward_waiting),
            1e3 * mean.backward_waiting, 1e3 * mean.step, 1e3 * mean.between, 1e3 * mean.waiting, 1e3 * mean.files,
            1e3 * mean.optimizer));
    if (const std::string text = limit(); !text.empty()) log(LogLevel::info, text);
  }
  if (!config_.report().memory_breakdown) return;
  std::string text;
  for (const MemoryLine& line : place_.memory()) {
    text += format_text("{}{}: {} (forecast {})", text.empty() ? "memory at most | " : " | ", deeptide::text(line.role),
                        bytes_text(line.measured_bytes + line.measured_off_device_bytes),
                        bytes_text(line.predicted_bytes + line.off_device_bytes));
  }
  log(LogLevel::info, text);
}

void Reporter::record(const StepEnd& end, const std::vector<MonitorEvent>& events) {
  const StepOutcome& outcome = end.outcome;
  json line = {{"kind", "step"},
               {"step", outcome.step},
               {"samples", end.global_samples},
               {"applied", outcome.applied()},
               {"loss", number(loss_)},
               {"lr", outcome.lr},
               {"norm", number(outcome.grad_norm)},
               {"loss_scale", outcome.loss_scale},
               {"sent_bytes", outcome.sent_bytes},
               {"tokens", tokens_ * static_cast<int64_t>(place_.ranks.size())},
               {"times", times_json(last_)},
               {"wall_s", static_cast<double>(trace::now_ns()) * 1e-9}};
  if (!outcome.applied()) line["reason"] = outcome.reason;
  for (const MonitorEvent& event : events) line["events"][event.name] = number(event.value);
  for (int i = 0; i < device::kNumRoles; ++i) {
    const auto role = static_cast<device::Role>(i);
    if (const int64_t peak = place_.ledger->peak(role); peak > 0) {
      line["memory"][device::role_name(role)] = {place_.ledger->current(role), peak};
    }
  }
  if (is_due(outcome.step) && window_steps_ > 0) {
    line["limit"] = limit();
    for (const StepTimes& sum : window_) line["ranks"].push_back(times_json(over(sum, window_steps_)));
    line["counted"] = {{"flops", counted_.flops}, {"moved_bytes", counted_.bytes}};
  }
  record_->write(line);
}

std::string Reporter::late_text() const {
  std::string text;
  for (size_t i = 0; i < window_.size() && window_steps_ > 0; ++i) {
    const StepTimes mean = over(window_[i], window_steps_);
    text += format_text("\nrank {}: waits {:.2f} ms of a step's {:.2f} ms", place_.ranks[i], 1e3 * mean.waiting,
                        1e3 * mean.total);
  }
  return text;
}

std::vector<CollectiveLine> Reporter::collectives() const {
  return comms_ ? comms_->lines() : std::vector<CollectiveLine>();
}

std::string Reporter::collectives_text() const {
  const std::string table = comms_ ? comms_->text() : "";
  return table.empty() ? table : table + late_text();
}

/// Lets the clock listen while `deeptide top` looks at this rank.
void Reporter::follow_watchers() {
  const bool was_watched = std::exchange(is_watched_, trace::flight_log().is_watched());
  if (was_watched && !is_watched_) trace::flight_log().note_step({});  // would be old news to who looks next
  const bool is_wanted = breaks_down_ || is_watched_;
  if (is_wanted == is_timed_) return;
  is_timed_ = is_wanted;
  if (is_timed_) return place_.recorder->add(clock_);
  place_.recorder->remove(clock_);
  clock_.take();
  last_ = told_ = {};
}

/// Puts the step where `deeptide top` reads it.
void Reporter::show(const StepEnd& end) const {
  trace::FlightFacts facts{.step = end.outcome.step,
                           .skipped_steps = end.skipped_steps,
                           .samples = end.global_samples,
                           .train_batch = place_.train_batch,
                           .tokens = tokens_,
                           .loss = loss_,
                           .norm = end.outcome.grad_norm,
                           .lr = end.outcome.lr,
                           .total_s = last_.total,
                           .computing_s = last_.computing(),
                           .waiting_s = last_.waiting,
                           .files_s = last_.files,
                           .data_s = last_.between,
                           .optimizer_s = last_.optimizer,
                           .sent_bytes = static_cast<double>(end.outcome.sent_bytes),
                           .flops = counted_.flops,
                           .moved_bytes = counted_.bytes};
  for (int i = 0; i < device::kNumRoles; ++i) {
    facts.memory_bytes += place_.ledger->current(static_cast<device::Role>(i));
  }
  const std::string line = place_.is_first() ? limit() : "";
  line.copy(facts.limit, std::min(line.size(), sizeof facts.limit - 1));
  trace::flight_log().note_step(facts);
}

/// In no step's time. The next step is nobody's measure either: its ranks wait for the one that measures longest.
void Reporter::measure_machine(int64_t step) {
  place_.recorder->enter(Phase::outside, step);
  peak_ = measure_peak(place_.device, place_.dtype);
  place_.recorder->enter(Phase::between, step);
  is_disturbed_ = true;
}

Reporter::Counted Reporter::sum_of(const std::vector<OperatorUse>& uses) {
  Counted sum;
  for (const OperatorUse& use : uses) {
    sum.flops += 2.0 * static_cast<double>(use.macs);
    sum.bytes += static_cast<double>(use.bytes);
  }
  return sum;
}

/// `step` has ended: begins or ends the count of one step's operators.
void Reporter::count_operators(int64_t step) {
  const int64_t profiled = std::max<int64_t>(config_.flops_profiler().profile_step, 1);
  const bool is_profiled = profiles_ && step == profiled;
  const bool is_counted = breaks_down_ && seen_steps_ == kCountedStep;
  if (counter_) {
    const auto uses = counter_->uses();
    counter_.reset();  // also one of a step that a checkpoint has skipped
    counted_ = sum_of(uses);
    if (is_profiled || is_counted) measure_machine(step);
    if (is_counted) {
      roofline_ = judge(uses, *peak_, place_.device.is_cpu());
      counted_s_ = last_.computing() - last_.optimizer;
    }
    if (is_profiled && place_.is_first()) write_profile(step, uses, *peak_);
  }
  const bool is_next_profiled = profiles_ && step + 1 == profiled;
  const bool is_next_counted = breaks_down_ && seen_steps_ + 1 == kCountedStep;
  const bool is_next_watched = is_watched_ && counted_.bytes == 0.0;
  if (is_next_profiled || is_next_counted || is_next_watched) counter_ = std::make_unique<OperatorCounter>();
}

}  // namespace report
}  // namespace deeptide
