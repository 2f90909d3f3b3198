// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The edges of a run: the first loss after a load, and the step before which a rank goes.
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "engine/step/stepper.h"

namespace deeptide::engine {

using comm::Call;
using comm::Close;

/// The mean of the losses that engine.backward() got since the last step; NaN: none.
double Stepper::mean_loss() const {
  double sum = 0.0;
  for (const at::Tensor& loss : losses_) sum += loss.item().toDouble();
  return losses_.empty() ? kNoLoss : sum / static_cast<double>(losses_.size());
}

/// Once: the next call of step() goes on with the same gradients.
void Stepper::check_first_loss() {
  const double expected = std::exchange(expected_loss_, kNoLoss);
  if (std::isnan(expected)) return;  // to read a loss is to wait for the device
  const double loss = mean_loss(), tolerance = parts_.config.checkpoint().loss_tolerance;
  if (std::isnan(loss) || std::abs(loss - expected) <= tolerance * std::abs(expected)) return;
  throw CheckpointError(
      fmt::format("step: the first loss after load_checkpoint is {:g}, the last one before the save was {:g}, and "
                  "checkpoint.loss_tolerance allows a difference of {:g} of it. Check that model, data and "
                  "configuration are those of the run that saved, or call step() again to go on",
                  loss, expected, tolerance));
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

}  // namespace deeptide::engine
