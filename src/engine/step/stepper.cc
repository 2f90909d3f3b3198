// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs one step, in the order of its phases.
#include "engine/step/stepper.h"

#include <ATen/ops/full_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/interrupt.h"
#include "base/libraries/format.h"
#include "base/log.h"
#include "comm/device_read.h"
#include "deeptide/compression.h"
#include "engine/bind/agreement.h"
#include "engine/step/across_stages.h"
#include "optim/compressed/compressed_rule.h"

namespace deeptide::engine {

using comm::Call;
using comm::Close;
using comm::Verdict;

Stepper::Stepper(const StepperParts& parts, std::unique_ptr<optim::Schedule> schedule)
    : parts_(parts),
      schedule_(std::move(schedule)),
      base_hyperparameters_(parts.progress.hyperparameters),
      terms_(parts.channels, parts.boundary, parts.live, parts.reducer, parts.progress),
      skipped_({parts.config, parts.channels, parts.boundary, parts.model, parts.residency, parts.reducer,
                parts.progress, parts.rewind}),
      drift_(parts.channels, parts.boundary, parts.model, parts.optimizer, parts.config.runtime()) {
  parts_.progress.loss_scale = optim::initial_loss_scale(parts_.config.precision());
  follow_loss_scale();
  follow_schedule();
  follow_boundary();
  if (parts_.intake) {
    parts_.boundary.take_early_by([this] { parts_.intake->take_left(); });
    parts_.intake->passes().set_accumulation(parts_.batch.accumulation);
  }
  sent_bytes_ = bytes_sent_for_steps();  // what initialize made equal on all ranks
}

void Stepper::follow_loss_scale() {
  if (parts_.intake) parts_.intake->set_loss_scale(loss_scale());
  if (parts_.kept) parts_.kept->set_loss_scale(loss_scale());
  if (parts_.reducer) parts_.reducer->set_loss_scale(loss_scale());
}

void Stepper::follow_schedule() {
  Progress& progress = parts_.progress;
  if (!schedule_) return;
  schedule_->apply(progress.schedule_iteration, base_hyperparameters_, progress.hyperparameters);
  ++hyperparameters_version_;
}

void Stepper::follow_rewind() {
  follow_schedule();
  const std::string& place = parts_.rewind->kept().compression;
  if (compression_ && !place.empty()) compression_->take_state(place);
}

void Stepper::backward(const at::Tensor& loss, bool retain_graph) {
  refuse_in_interrupt_handler("backward()");
  TORCH_CHECK_VALUE(loss.defined(), "backward: the loss is undefined");
  TORCH_CHECK_VALUE(parts_.reducer != nullptr, "backward: this engine has no optimizer (", parts_.config.origin(),
                    " has no \"optimizer\" section and none was given to initialize)");
  TORCH_CHECK_VALUE(loss.numel() == 1, "backward: the loss must be a scalar, got shape ", loss.sizes(),
                    "; reduce it first, e.g. loss.mean()");
  TORCH_CHECK_VALUE(loss.requires_grad(),
                    "backward: the loss does not require grad: it was computed under no_grad, or from "
                    "detached or frozen tensors only");
  parts_.model.check_sizes();
  const trace::RecorderScope scope(parts_.channels.recorder().get());
  parts_.reporter.follow_profiler();
  RECORD_USER_SCOPE("deeptide::backward");
  parts_.channels.recorder()->enter(trace::Phase::backward, parts_.progress.global_steps);
  losses_.note(loss);
  parts_.intake->passes().note_own();
  {
    const GradientIntake::Scaled scaled(*parts_.intake);
    torch::autograd::backward({loss}, {at::full_like(loss, loss_scale())}, retain_graph);
  }
  if (keeps_always() && is_boundary()) show_gradients();
}

void Stepper::backward_from(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients) {
  refuse_in_interrupt_handler("backward()");
  TORCH_CHECK_VALUE(outputs.size() == gradients.size(), "backward: got ", gradients.size(), " gradients of ",
                    outputs.size(), " outputs");
  TORCH_CHECK_VALUE(parts_.reducer != nullptr, "backward: this engine has no optimizer");
  const trace::RecorderScope scope(parts_.channels.recorder().get());
  parts_.reporter.follow_profiler();
  RECORD_USER_SCOPE("deeptide::backward");
  parts_.channels.recorder()->enter(trace::Phase::backward, parts_.progress.global_steps);
  {
    const GradientIntake::Scaled scaled(*parts_.intake);
    torch::autograd::backward(outputs, gradients);
  }
  if (keeps_always() && is_boundary()) show_gradients();
}

bool Stepper::is_boundary() const {
  return boundary_override_.value_or((parts_.progress.micro_steps + 1) % parts_.batch.accumulation == 0);
}

void Stepper::set_boundary(std::optional<bool> boundary) {
  boundary_override_ = boundary;
  follow_boundary();
}

/// By the hyper-parameters of the start: backward must know before ranks compare what they are now.
bool Stepper::exchanges_signs() const {
  if (!parts_.optimizer || !parts_.optimizer->signs()) return false;
  const int64_t next = parts_.optimizer->counts().steps() + 1;
  return optim::exchanged_by(parts_.optimizer->rule(), base_hyperparameters_, next) == optim::Exchanged::signs;
}

/// Stages that reduce only at the boundary keep gradients here until then.
void Stepper::follow_boundary() {
  if (!parts_.reducer) return;
  const bool signs = exchanges_signs();
  if (signs && !std::exchange(said_signs_, true) && parts_.channels.is_first()) {
    log(LogLevel::info, format_text("{}: step {} is the first in which ranks exchange signs, {} bytes per rank",
                                    parts_.optimizer->rule().name(), parts_.progress.global_steps + 1,
                                    parts_.optimizer->signs()->bytes_per_step()));
  }
  signs_ = signs;
  parts_.reducer->set_local(signs_ || (!parts_.policy.reduce_every_micro && !is_boundary()));
}

std::vector<Close> Stepper::close(bool joined) {
  const auto closes = parts_.boundary.enter(Call::step, [&](Close& own) {
    own.boundary = is_boundary();
    own.joined = joined;
    own.rounds = parts_.reducer->rounds_begun();  // in case of a failure
    TORCH_CHECK_VALUE(!parts_.optimizer->states().are_away(),
                      "step: the optimizer's states are offloaded; call reload_states() first, on all ranks. The "
                      "gradients are kept");
    if (own.boundary) losses_.check_first(parts_.config.checkpoint().loss_tolerance);
    parts_.model.check_trained();
    parts_.live.check_trained();
    const bool shown = parts_.kept && parts_.kept->shown();  // then `.grad` holds what has been reduced
    const std::vector<bool> left = shown ? std::vector<bool>() : parts_.intake->check_left();
    own.has_gradient =
        shown || parts_.reducer->has_pending() || std::find(left.begin(), left.end(), true) != left.end();
    own.rounds = parts_.reducer->rounds_wanted_with(left);
  });
  // Not before all ranks' checks have passed: a failure leaves every rank as it was.
  const Call call = call_of(closes);
  if (call == Call::step) take_gradients();
  if (call == Call::zero_grad && parts_.kept) parts_.kept->forget();
  if (call == Call::zero_grad) parts_.intake->drop_left();
  return closes;
}

/// Whether the program says that this step() is no boundary, and gradients stay here until there is one: then no other
/// rank needs to hear of it. Where all count alike, they meet, so that an error of one is an error of all.
bool Stepper::steps_alone() const {
  return boundary_override_ == false && !parts_.kept && parts_.channels.data().size() > 1 &&
         parts_.reducer->is_local() && parts_.reducer->rounds_begun() == 0 && !parts_.policy.reduce_every_micro;
}

StepOutcome Stepper::accumulate_alone() {
  parts_.model.check_bound();
  parts_.live.check_trained();
  parts_.intake->check_left();
  parts_.intake->take_left();
  parts_.reducer->finish(/*rounds=*/0);
  StepOutcome outcome = accumulating();
  end_micro_batch();
  return finished(std::move(outcome));
}

std::optional<StepOutcome> Stepper::step(bool joined) {
  refuse_in_interrupt_handler("step()");
  TORCH_CHECK_VALUE(parts_.reducer != nullptr, "step: this engine has no optimizer");
  const trace::RecorderScope scope(parts_.channels.recorder().get());
  parts_.reporter.follow_profiler();
  RECORD_USER_SCOPE("deeptide::step");
  parts_.channels.recorder()->enter(trace::Phase::step, parts_.progress.global_steps);
  parts_.intake->passes().note_step();
  if (!joined && steps_alone()) return accumulate_alone();
  for (;;) {
    const auto closes = close(joined);
    if (call_of(closes) == Call::preempt) return step_aside(closes);
    if (call_of(closes) != Call::step) {
      follow(closes);
      continue;
    }
    const auto any = [&](auto predicate) { return std::any_of(closes.begin(), closes.end(), predicate); };
    if (!any([](const Close& c) { return !c.joined; })) return std::nullopt;
    parts_.reducer->finish(most_rounds(closes));
    const bool all_end = !any([](const Close& c) { return !c.joined && !c.boundary; });
    if (all_end) return end_step(closes);
    const bool any_ends = any([](const Close& c) { return !c.joined && c.boundary; });
    // Ranks may have different numbers of micro-batches: those that are at the boundary wait there for the others.
    if (any_ends && (joined || is_boundary())) continue;
    check_has_gradient(closes);
    StepOutcome outcome = accumulating();
    end_micro_batch();
    return finished(std::move(outcome));
  }
}

void Stepper::check_has_gradient(const std::vector<Close>& closes) const {
  Stages* const stages = parts_.channels.stages();
  const bool may_have_none = stages != nullptr && stages->take_backward();  // a program may call no block of a stage
  TORCH_CHECK_VALUE(
      may_have_none || parts_.model.trainable().empty() || parts_.reducer->has_gradient() ||
          !std::all_of(closes.begin(), closes.end(), [](const Close& c) { return !c.has_gradient; }),
      "step() before backward(): no rank has a gradient. Call engine.backward(loss) or loss.backward() first. If you "
      "did, the model's parameters are no longer those given to initialize: load_state_dict(assign=True) and the "
      "like replace them; load in place.");
}

/// All ranks that train are at the boundary.
StepOutcome Stepper::end_step(const std::vector<Close>& closes) {
  check_has_gradient(closes);
  say_mixture();
  const Update update;  // other ranks go on with theirs
  const auto verdicts = judge();
  if (terms_.follow_leader(verdicts, closes)) ++hyperparameters_version_;
  StepOutcome outcome = apply(verdicts);
  const int64_t sent = bytes_sent_for_steps();
  outcome.sent_bytes = sent - std::exchange(sent_bytes_, sent);
  outcome.preempted = agrees_to_go();
  parts_.saver.meet_stages();
  Progress& progress = parts_.progress;
  // A rank that has joined counts no micro-batches of its own.
  const int64_t within = (progress.micro_steps + 1) % parts_.batch.accumulation;
  if (!boundary_override_ && within != 0) progress.micro_steps += parts_.batch.accumulation - within;
  end_micro_batch();
  parts_.last.note(progress.micro_steps);
  parts_.reporter.end_step({outcome, progress.hyperparameters, progress.global_samples, progress.skipped_steps});
  return finished(std::move(outcome));
}

/// Adds what became of a save beside training. Errors: those that a step ends with when all else is done.
StepOutcome Stepper::finished(StepOutcome outcome) {
  if (auto saved = parts_.saver.take_result()) {
    outcome.saved = saved->error.empty() ? saved->path : "";
    outcome.save_error = std::move(saved->error);
  }
  if (!drifted_.empty()) throw DriftError(std::exchange(drifted_, {}));
  if (const std::string error = skipped_.take_error(); !error.empty()) throw NonFiniteError(error);
  return outcome;
}

/// Whether a rank of any stage was asked to go: the ranks of one stage know it of each other.
bool Stepper::agrees_to_go() {
  Preemption& preemption = parts_.preemption;
  Stages* const stages = parts_.channels.stages();
  const bool asks = stages != nullptr && preemption.is_on();
  if (asks && any_stage(*stages, preemption.is_agreed(), "asking the other stages whether a rank has to go")) {
    preemption.agree();
  }
  return preemption.is_agreed();
}

/// Not what `arrivals` leaves to the channel of gathers: when that starts depends on time.
int64_t Stepper::bytes_sent_for_steps() {
  int64_t sent = parts_.channels.all(Channels::Purpose::reductions).sent_bytes();
  if (parts_.arrivals) sent += parts_.arrivals->sent_bytes();
  if (parts_.kept) sent += parts_.kept->sent_bytes();
  if (parts_.policy.shard_parameters) sent += parts_.channels.all(Channels::Purpose::gathers).sent_bytes();
  return sent;
}

/// Exchanges what each rank knows about its gradient shards: their squares, and the first bad parameter if any.
std::vector<Verdict> Stepper::judge() {
  if (auto* custom = parts_.optimizer->custom()) custom->optimizer().read_groups(parts_.progress.hyperparameters);
  Verdict verdict;
  const auto read = [this](const at::Tensor& figures) {
    return comm::read_on_host(parts_.channels.reductions(), figures, {"step", "reading the norm of the gradients"});
  };
  // Nobody knows the norm of the mean where gradients stay with their ranks: the root of their mean square bounds it.
  verdict.squares = signs_ ? parts_.reducer->local_squares() : parts_.reducer->sum_of_squares(read);
  const auto seen = parts_.reducer->seen();
  verdict.has_seen_all = std::find(seen.begin(), seen.end(), 0) == seen.end();
  verdict.hyperparameters = digest_of(parts_.progress.hyperparameters);
  if (const auto& bad = parts_.reducer->bad()) {
    verdict.bad_unit = bad->unit;
    verdict.bad_parameter = bad->parameter;
    verdict.bad_rank = bad->rank;
  }
  verdict.lost = parts_.reducer->take_lost();
  verdict.links = parts_.links.own_facts();
  verdict.times = parts_.reporter.own_times();
  if (parts_.reporter.wants_loss(parts_.progress.global_steps + 1)) verdict.loss = losses_.mean();
  auto verdicts = parts_.boundary.exchange(verdict, {"step", "agreeing on the gradient norm"});
  parts_.links.note(verdicts);
  parts_.reporter.note(verdicts, parts_.progress.global_steps);
  return verdicts;
}

StepOutcome Stepper::accumulating() const {
  StepOutcome outcome;
  outcome.step = parts_.progress.global_steps;
  outcome.lr = parts_.progress.hyperparameters.front().lr();
  outcome.grad_norm = outcome.clipped_norm = std::numeric_limits<double>::quiet_NaN();
  const int64_t count = parts_.batch.accumulation;
  outcome.reason =
      "accumulating " + std::to_string(parts_.progress.micro_steps % count + 1) + "/" + std::to_string(count);
  return outcome;
}

StepOutcome Stepper::apply(const std::vector<Verdict>& verdicts) {
  Progress& progress = parts_.progress;
  double total = 0.0;
  for (const Verdict& verdict : verdicts) total += verdict.squares;  // in rank order: equal on all ranks
  if (Stages* const stages = parts_.channels.stages()) {
    const StageTotals all = over_stages(*stages, {total, parts_.reporter.loss()});
    total = all.squares;
    parts_.reporter.note_loss(all.loss);
  }
  StepOutcome outcome;
  outcome.step = ++progress.global_steps;
  progress.global_samples += parts_.batch.train;
  numerics::QuantizationLoss lost;
  for (const Verdict& verdict : verdicts) lost.add(verdict.lost);
  if (lost.of_squares > 0.0) outcome.rounding = std::sqrt(lost.squares / lost.of_squares);
  outcome.largest_rounding = lost.largest;
  outcome.lr = progress.hyperparameters.front().lr();
  outcome.loss_scale = loss_scale();
  outcome.grad_norm = outcome.clipped_norm = std::sqrt(total) / outcome.loss_scale;
  const bool overflow = !std::isfinite(total);
  progress.loss_scale = optim::next_loss_scale(parts_.config.precision(), progress.loss_scale, overflow);
  follow_loss_scale();
  if (overflow) {
    skipped_.skip(outcome, verdicts, losses_);
    if (outcome.rewound_to >= 0) follow_rewind();
    losses_.clear();
    return outcome;
  }
  if (parts_.config.checkpoint().loss_tolerance > 0.0 && parts_.channels.is_first())
    progress.last_loss = losses_.mean();
  losses_.clear();
  progress.skipped_in_a_row = 0;
  if (parts_.rewind) outcome.kept = parts_.rewind->keep_if_due(progress, compression_.get());
  double scale = 1.0;
  if (parts_.config.gradients().clipping > 0.0) {
    scale = std::min(1.0, parts_.config.gradients().clipping / (outcome.grad_norm + 1e-6));
    outcome.clipped_norm = outcome.grad_norm * scale;
  }
  apply_gradients(verdicts, scale / outcome.loss_scale);
  if (parts_.arrivals && drift_.is_due(progress.optimizer_steps)) parts_.arrivals->wait_all();
  drifted_ = drift_.check(progress.optimizer_steps);
  outcome.result = StepResult::applied;
  return outcome;
}

/// An error or an interrupt in here leaves some parameters stepped and others not: until a load, no step goes on from
/// that, and no checkpoint holds it.
void Stepper::apply_gradients(const std::vector<Verdict>& verdicts, double scale) {
  Progress& progress = parts_.progress;
  const auto active = terms_.agree_on_active(verdicts, parts_.model.trainable());
  parts_.residency.begin_step();
  parts_.boundary.refuse_to_go_on(format_text(
      "step {} ended in the middle of its update, by an error or an interrupt: some parameters were stepped "
      "and others were not. Call load_checkpoint() with the last checkpoint, which is as it was",
      progress.global_steps));
  {
    const trace::Span span(parts_.channels.recorder().get(), trace::Work::optimizer, "optimizer step");
    parts_.optimizer->step(*parts_.reducer, scale, progress.hyperparameters, active);
  }
  parts_.residency.end_step();
  progress.optimizer_steps = parts_.optimizer->counts().steps();
  parts_.reducer->clear_accumulated();
  if (schedule_) ++progress.schedule_iteration;
  follow_schedule();
  if (compression_) compression_->step();
  parts_.boundary.go_on();
}

void Stepper::preempt() {
  const auto closes = parts_.boundary.enter(Call::preempt, [&](Close& own) {
    own.asked_to_go = true;
    if (parts_.reducer) own.rounds = parts_.reducer->rounds_begun();
  });
  step_aside(closes);
}

/// Some rank goes before this step: what it was to be of is dropped on all ranks.
StepOutcome Stepper::step_aside(const std::vector<Close>& closes) {
  losses_.clear();
  StepOutcome outcome;
  outcome.step = parts_.progress.global_steps;
  outcome.reason = "a rank was asked to go before this step";
  outcome.preempted = true;
  if (!parts_.reducer) return outcome;
  if (parts_.kept) parts_.kept->forget();
  parts_.intake->drop_left();
  parts_.reducer->discard(most_rounds(closes));
  parts_.progress.micro_steps -= parts_.progress.micro_steps % parts_.batch.accumulation;
  follow_boundary();
  return outcome;
}

void Stepper::end_micro_batch() {
  const int64_t step = parts_.progress.global_steps;
  ++parts_.progress.micro_steps;
  parts_.channels.recorder()->enter(trace::Phase::between, step);
  parts_.channels.clock().set_step(step);
  follow_boundary();
}

void Stepper::restore(const Progress& saved, bool moments, bool schedule) {
  Progress& progress = parts_.progress;
  progress.global_steps = saved.global_steps;
  progress.global_samples = saved.global_samples;
  progress.skipped_steps = saved.skipped_steps;
  progress.skipped_in_a_row = saved.skipped_in_a_row;
  progress.last_loss = saved.last_loss;
  const bool compares = parts_.config.checkpoint().loss_tolerance > 0.0 && parts_.channels.is_first();
  losses_.expect(compares ? saved.last_loss : kNoLoss);
  // Saved at a step's end. If a step now has another number of micro-batches, the next one begins here as well.
  progress.micro_steps = saved.micro_steps - saved.micro_steps % parts_.batch.accumulation;
  if (moments) {
    progress.optimizer_steps = saved.optimizer_steps;
    progress.parameter_steps = saved.parameter_steps;
    parts_.optimizer->counts().set_steps(saved.optimizer_steps, saved.parameter_steps);
    parts_.optimizer->counts().set_parameter_numbers(saved.parameter_numbers);
    progress.hyperparameters = saved.hyperparameters;
    const PrecisionConfig& precision = parts_.config.precision();
    // A run in another type has no scale to give: it saves 1, and no steps.
    const bool was_scaled = saved.loss_scale.steps > 0 || saved.loss_scale.scale != 1.0;
    if (was_scaled && precision.scales_loss() && precision.loss_scale == 0.0) progress.loss_scale = saved.loss_scale;
    follow_loss_scale();
  }
  if (schedule) progress.schedule_iteration = saved.schedule_iteration;
  ++hyperparameters_version_;
  follow_schedule();
  parts_.channels.clock().set_step(progress.global_steps);
  follow_boundary();
  parts_.last.note(progress.micro_steps);
}

}  // namespace deeptide::engine
