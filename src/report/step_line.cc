// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The line that a run prints every few steps.

#include "base/libraries/format.h"
#include "base/log.h"
#include "report/reporter.h"

namespace deeptide::report {
namespace {

/// An optimizer's betas or its momentum; 0 when it has neither.
std::string momentum_text(const Hyperparameters& h) {
  const bool orthogonalizes = h.has("use_muon") && h.get("use_muon") != 0.0;
  if (h.has("beta1") && !orthogonalizes) return format_text("({:.6g}, {:.6g})", h.get("beta1"), h.get("beta2"));
  return format_text("{:.6g}", h.has("momentum") ? h.get("momentum") : 0.0);
}

}  // namespace

void write_step_line(const StepEnd& end) {
  std::string rates, momenta;
  for (const Hyperparameters& h : end.groups) {
    const char* separator = rates.empty() ? "" : ", ";
    rates += format_text("{}{:.6g}", separator, h.lr());
    momenta += separator + momentum_text(h);
  }
  const std::string rounding = end.outcome.rounding > 0.0
                                   ? format_text(", rounding={:.3g} (largest {:.3g} of its block's largest)",
                                                 end.outcome.rounding, end.outcome.largest_rounding)
                                   : "";
  log(LogLevel::info,
      format_text("step={}, skipped={}, lr=[{}], mom=[{}], norm={:.4g}{}{}", end.outcome.step, end.skipped_steps, rates,
                  momenta, end.outcome.grad_norm, rounding, end.outcome.applied() ? "" : ", " + end.outcome.reason));
}

}  // namespace deeptide::report
