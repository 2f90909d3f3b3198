// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The line that a run prints every few steps.
#include <fmt/format.h>

#include "base/log.h"
#include "engine/stepper.h"

namespace deeptide::engine {
namespace {

/// An optimizer's betas or its momentum; 0 when it has neither.
std::string momentum_text(const Hyperparameters& h) {
  const bool orthogonalizes = h.has("use_muon") && h.get("use_muon") != 0.0;
  if (h.has("beta1") && !orthogonalizes) return fmt::format("({:.6g}, {:.6g})", h.get("beta1"), h.get("beta2"));
  return fmt::format("{:.6g}", h.has("momentum") ? h.get("momentum") : 0.0);
}

}  // namespace

/// Prints the line of every `steps_per_print` steps, in DeepSpeed's words.
void Stepper::print(const StepOutcome& outcome) const {
  const Progress& progress = parts_.progress;
  const auto every = parts_.config.report().steps_per_print;
  if (!parts_.channels.is_first() || every.value_or(0) < 1 || progress.global_steps % *every != 0) return;
  std::string rates, momenta;
  for (const Hyperparameters& h : progress.hyperparameters) {
    const char* separator = rates.empty() ? "" : ", ";
    rates += fmt::format("{}{:.6g}", separator, h.lr());
    momenta += separator + momentum_text(h);
  }
  log(LogLevel::info, fmt::format("step={}, skipped={}, lr=[{}], mom=[{}], norm={:.4g}{}", progress.global_steps,
                                  progress.skipped_steps, rates, momenta, outcome.grad_norm,
                                  outcome.applied() ? "" : ", " + outcome.reason));
}

}  // namespace deeptide::engine
