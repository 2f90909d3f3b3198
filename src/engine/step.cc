// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// From a loss to new parameters: close the micro-batch, reduce, judge, clip, step, publish.
#include <ATen/ops/ones_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <bit>

#include "base/log.h"
#include "engine/engine_impl.h"

namespace deeptide {

using comm::Message;

namespace {

constexpr int32_t kBoundary = 1;
constexpr int32_t kJoined = 2;
constexpr int32_t kHasGradient = 4;
constexpr int32_t kHasWritten = 8;  // parameters in shared memory, for itself
// Message::numbers of the exchange that judges a step, by position.
constexpr int kSquares = 0;
constexpr int kBadParameter = 1;
constexpr int kBadRank = 2;

int64_t as_bits(double value) { return std::bit_cast<int64_t>(value); }
double as_double(int64_t bits) { return std::bit_cast<double>(bits); }

Operation operation_of(const Message& message) { return static_cast<Operation>(message.numbers[kOperation]); }

/// The first rank that still trains; 0 when all have joined.
int leading_rank(const std::vector<Message>& messages) {
  const auto trains = [](const Message& m) { return (m.flags & kJoined) == 0; };
  const auto found = std::find_if(messages.begin(), messages.end(), trains);
  return found == messages.end() ? 0 : static_cast<int>(found - messages.begin());
}

/// An optimizer's betas or its momentum; 0 when it has neither.
std::string momentum_text(const Hyperparameters& h) {
  if (h.has("beta1")) return fmt::format("({:.6g}, {:.6g})", h.get("beta1"), h.get("beta2"));
  return fmt::format("{:.6g}", h.has("momentum") ? h.get("momentum") : 0.0);
}

}  // namespace

void Engine::Impl::backward(const at::Tensor& loss, bool retain_graph) {
  TORCH_CHECK_VALUE(loss.defined(), "backward: the loss is undefined");
  TORCH_CHECK_VALUE(reducer != nullptr, "backward: this engine has no optimizer (", config.origin,
                    " has no \"optimizer\" section and none was given to initialize)");
  TORCH_CHECK_VALUE(loss.numel() == 1, "backward: the loss must be a scalar, got shape ", loss.sizes(),
                    "; reduce it first, e.g. loss.mean()");
  TORCH_CHECK_VALUE(loss.requires_grad(),
                    "backward: the loss does not require grad: it was computed under no_grad, or from "
                    "detached or frozen tensors only");
  trace::flight_log().enter(global_steps, "backward", "");
  torch::autograd::backward({loss}, {at::ones_like(loss)}, retain_graph);
}

bool Engine::Impl::is_boundary() const {
  return boundary_override.value_or((micro_steps + 1) % batch.accumulation == 0);
}

void Engine::Impl::set_boundary(std::optional<bool> boundary) {
  boundary_override = boundary;
  if (reducer) reducer->set_local(!policy.reduce_every_micro && !is_boundary());
}

void Engine::Impl::zero_grad() {
  if (!reducer) return;
  Message own;
  own.numbers[kRounds] = reducer->rounds_begun();
  reducer->discard(most_rounds(enter(Operation::zero_grad, own)));
}

int64_t Engine::Impl::most_rounds(const std::vector<Message>& messages) {
  int64_t rounds = 0;
  for (const Message& m : messages) rounds = std::max(rounds, m.numbers[kRounds]);
  return rounds;
}

std::vector<Message> Engine::Impl::enter(Operation operation, Message own) {
  own.kind = Message::Kind::close;
  own.numbers[kOperation] = static_cast<int64_t>(operation);
  if (has_private_writes()) own.flags |= kHasWritten;
  auto messages = residency->close(own, global_steps, /*ends_pass=*/operation != Operation::zero_grad);
  // Ranks that have joined have no loop of their own: they drop gradients when the others do.
  const int leader = leading_rank(messages);
  const auto first = operation_of(messages[leader]);
  for (int r = 0; r < world.size; ++r) {
    const auto other = operation_of(messages[r]);
    const bool follows = (messages[r].flags & kJoined) != 0 && first == Operation::zero_grad;
    if (other != first && !follows) {
      throw CommError(
          "the ranks do different things: rank " + std::to_string(leader) + " called " + operation_name(first) +
          ", rank " + std::to_string(r) + " called " + operation_name(other) +
          ". Every rank must call the collective methods in the same order; ranks that run out of data call join().");
    }
  }
  take_private_writes(messages);
  return messages;
}

bool Engine::Impl::has_private_writes() const {
  return std::any_of(model.units().begin(), model.units().end(), [](const auto& u) { return u->has_private_writes(); });
}

/// Nobody computes now: what programs wrote into parameters comes into the memory that all ranks share, each rank's
/// slice from itself.
void Engine::Impl::take_private_writes(const std::vector<Message>& messages) {
  if (std::none_of(messages.begin(), messages.end(), [](const Message& m) { return (m.flags & kHasWritten) != 0; })) {
    return;
  }
  for (const auto& unit : model.units()) {
    if (unit->shared()) unit->take_private_writes();
  }
  control.barrier({global_steps, "step", "waiting for all ranks' own writes to parameters"});
}

void Engine::Impl::end_micro_batch() {
  ++micro_steps;
  trace::flight_log().enter(global_steps, "forward", "");
  set_boundary(boundary_override);
  residency->set_step(global_steps);
  reducer->set_step(global_steps);
  optimizer->set_step_for_errors(global_steps);
}

std::vector<Message> Engine::Impl::enter_step(bool joined) {
  Message own;
  own.flags = (is_boundary() ? kBoundary : 0) | (joined ? kJoined : 0) | (reducer->has_pending() ? kHasGradient : 0);
  own.numbers[kRounds] = reducer->rounds_wanted();
  return enter(Operation::step, own);
}

std::optional<StepOutcome> Engine::Impl::step(bool joined) {
  TORCH_CHECK_VALUE(reducer != nullptr, "step: this engine has no optimizer");
  model.check_bound();
  trace::flight_log().enter(global_steps, "step", "");
  auto messages = enter_step(joined);
  while (operation_of(messages[leading_rank(messages)]) == Operation::zero_grad) {
    reducer->discard(most_rounds(messages));
    messages = enter_step(joined);
  }

  bool all_joined = true, any_gradient = false;
  for (const Message& m : messages) {
    all_joined = all_joined && (m.flags & kJoined) != 0;
    any_gradient = any_gradient || (m.flags & kHasGradient) != 0;
    if ((m.flags & kBoundary) != (messages[0].flags & kBoundary)) {
      throw CommError(
          "the ranks disagree on the accumulation boundary; set_gradient_accumulation_boundary must be called "
          "alike on every rank");
    }
  }
  if (all_joined) return std::nullopt;
  reducer->finish(most_rounds(messages));
  const bool boundary = is_boundary();
  TORCH_CHECK_VALUE(
      any_gradient || reducer->has_gradient(),
      "step() before backward(): no rank has a gradient. Call engine.backward(loss) or loss.backward() first. If you "
      "did, the model's parameters are not those given to initialize any more: load_state_dict(assign=True) and the "
      "like replace them; load in place.");
  if (!boundary) {
    const StepOutcome outcome = accumulate_outcome();
    end_micro_batch();
    return outcome;
  }
  const auto verdicts = judge();
  double total = 0.0;
  for (const Message& m : verdicts) total += as_double(m.numbers[kSquares]);
  StepOutcome outcome = apply(total, verdicts);
  print_step(outcome);
  end_micro_batch();
  return outcome;
}

/// What every rank says of its gradient shards: their squares, and the first bad parameter if there is one.
std::vector<Message> Engine::Impl::judge() {
  Message verdict;
  verdict.numbers[kSquares] = as_bits(reducer->sum_of_squares());
  verdict.numbers[kBadParameter] = -1;
  if (const auto& bad = reducer->bad()) {
    const auto parameters = model.parameters();
    const auto at =
        std::find_if(parameters.begin(), parameters.end(), [&](const auto* p) { return p->name == bad->parameter; });
    verdict.numbers[kBadParameter] = at - parameters.begin();
    verdict.numbers[kBadRank] = bad->rank;
  }
  return residency->exchange(verdict, {global_steps, "step", "agreeing on the gradient norm"});
}

StepOutcome Engine::Impl::accumulate_outcome() const {
  StepOutcome outcome;
  outcome.step = global_steps;
  outcome.lr = hyperparameters.front().lr();
  outcome.grad_norm = outcome.clipped_norm = std::numeric_limits<double>::quiet_NaN();
  outcome.reason =
      "accumulating " + std::to_string(micro_steps % batch.accumulation + 1) + "/" + std::to_string(batch.accumulation);
  return outcome;
}

/// Parameters that stay whole may have been written by the user: their masters must follow.
void Engine::Impl::note_external_writes() {
  for (const auto& unit : model.units()) {
    if (unit->sharded() || unit->shared()) continue;
    for (sharding::Parameter& p : unit->parameters()) {
      const auto version = p.current_version();
      if (version != p.version) p.rewritten = true;
      p.version = version;
    }
  }
}

StepOutcome Engine::Impl::apply(double total, const std::vector<Message>& verdicts) {
  StepOutcome outcome;
  outcome.step = ++global_steps;
  outcome.lr = hyperparameters.front().lr();
  outcome.grad_norm = outcome.clipped_norm = std::sqrt(total);
  if (!std::isfinite(total)) {
    ++skipped_steps;
    outcome.reason = "non-finite gradient";
    for (const Message& m : verdicts) {
      const int64_t index = m.numbers[kBadParameter];
      if (index < 0) continue;
      const auto parameters = model.parameters();
      if (index < static_cast<int64_t>(parameters.size())) outcome.parameter = parameters[index]->name;
      outcome.rank = static_cast<int>(m.numbers[kBadRank]);
      break;
    }
    reducer->clear_accumulated();
    return outcome;
  }
  double scale = 1.0;
  if (config.gradient_clipping > 0.0) {
    scale = std::min(1.0, config.gradient_clipping / (outcome.grad_norm + 1e-6));
    outcome.clipped_norm = outcome.grad_norm * scale;
  }
  note_external_writes();
  optimizer->step(*reducer, scale, hyperparameters);
  reducer->clear_accumulated();
  residency->release_all();
  if (schedule) schedule->apply(++schedule_iteration, base_hyperparameters, hyperparameters);
  outcome.applied = true;
  return outcome;
}

/// The line of every `steps_per_print` steps, in DeepSpeed's words.
void Engine::Impl::print_step(const StepOutcome& outcome) const {
  if (world.rank != 0 || config.steps_per_print.value_or(0) < 1 || global_steps % *config.steps_per_print != 0) return;
  std::string rates, momenta;
  for (const Hyperparameters& h : hyperparameters) {
    const char* separator = rates.empty() ? "" : ", ";
    rates += fmt::format("{}{:.6g}", separator, h.lr());
    momenta += separator + momentum_text(h);
  }
  log(LogLevel::info, fmt::format("step={}, skipped={}, lr=[{}], mom=[{}], norm={:.4g}{}", global_steps, skipped_steps,
                                  rates, momenta, outcome.grad_norm, outcome.applied ? "" : ", " + outcome.reason));
}

}  // namespace deeptide
