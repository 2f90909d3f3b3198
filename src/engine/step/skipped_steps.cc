// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names the first bad parameter, and counts skipped steps.
#include "engine/step/skipped_steps.h"

#include <algorithm>
#include <span>

#include "base/libraries/format.h"
#include "base/log.h"
#include "engine/step/across_stages.h"

namespace deeptide::engine {

using comm::Verdict;
using world::TeamIndex;
using world::WorldRank;

void SkippedSteps::skip(StepOutcome& outcome, const std::vector<Verdict>& verdicts, const Losses& losses) {
  ++parts_.progress.skipped_steps;
  outcome.result = StepResult::non_finite;
  outcome.reason = "non-finite gradient";
  blame(outcome, verdicts, losses);
  if (Stages* const stages = parts_.channels.stages()) agree_on_blame(*stages, outcome);
  if (outcome.loss_scale != parts_.progress.loss_scale.scale) {
    outcome.reason += format_text("; loss scale {:g}, now {:g}", outcome.loss_scale, parts_.progress.loss_scale.scale);
  }
  parts_.reducer->clear_accumulated();
  const bool fp16 = parts_.config.precision().scales_loss();  // overflows are part of its life, and worth a line each
  if (fp16 && parts_.channels.is_first()) {
    log(LogLevel::info,
        format_text("step {} skipped: {}{}", outcome.step, outcome.reason,
                    outcome.parameter.empty()
                        ? ""
                        : format_text(" (in '{}', {})", outcome.parameter, parts_.channels.mesh().name(outcome.rank))));
  }
  if (outcome.rank >= 0) outcome.place = parts_.channels.mesh().place(outcome.rank);
  act_on_row(outcome);
}

/// Names the first bad parameter, its rank, and whether that rank's loss was bad already.
void SkippedSteps::blame(StepOutcome& outcome, const std::vector<Verdict>& verdicts, const Losses& losses) {
  const uint8_t own = losses.are_finite() ? 0 : 1;
  const auto in_forward =
      parts_.boundary.exchange_all(std::span<const uint8_t>(&own, 1), {"step", "telling forward from backward"});
  // A rank that has seen the contribution names its rank; one that has only the sum of a host's cannot.
  const auto named = [](const Verdict& v) { return v.bad_unit >= 0 && v.bad_rank != WorldRank::none; };
  auto bad = std::find_if(verdicts.begin(), verdicts.end(), named);
  if (bad == verdicts.end()) {
    bad = std::find_if(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.bad_unit >= 0; });
  }
  if (bad == verdicts.end()) return;
  outcome.parameter = parts_.model.units().at(bad->bad_unit)->parameters().at(bad->bad_parameter).name;
  if (bad->bad_rank == WorldRank::none) return;
  outcome.rank = number(bad->bad_rank);
  const TeamIndex index = parts_.channels.data().index_of(bad->bad_rank);
  outcome.phase = in_forward.at(number(index)) != 0 ? "forward" : "backward";
}

/// Acts when too many steps in a row were skipped. A lower loss scale may mend an overflow, so those above the
/// smallest scale do not count.
void SkippedSteps::act_on_row(StepOutcome& outcome) {
  Progress& progress = parts_.progress;
  const PrecisionConfig& precision = parts_.config.precision();
  const RuntimeConfig& runtime = parts_.config.runtime();
  const bool is_dynamic = precision.scales_loss() && precision.loss_scale == 0.0;
  if (is_dynamic && outcome.loss_scale > static_cast<double>(precision.min_loss_scale)) return;
  if (++progress.skipped_in_a_row < runtime.skipped_limit || runtime.on_skipped == OnSkipped::skip) return;
  if (runtime.on_skipped == OnSkipped::raise) {
    error_ = row_text(outcome);
    return;
  }
  if (!parts_.rewind->can_restore(progress)) {
    error_ = row_text(outcome) + ". A rewind cannot help: " + parts_.rewind->why_not();
    return;
  }
  const std::string text = row_text(outcome);
  progress.skipped_in_a_row = 0;
  parts_.residency.release_all();
  outcome.rewound_to = parts_.rewind->restore(progress);
  for (at::Tensor& error : parts_.reducer->rounding_errors()) error.zero_();
  outcome.reason += format_text("; back to the state of step {}", outcome.rewound_to);
  if (parts_.channels.is_first()) {
    log(LogLevel::warning, text + format_text(": back to the state of step {}", outcome.rewound_to));
  }
}

std::string SkippedSteps::row_text(const StepOutcome& outcome) const {
  std::string text = format_text("step {}: {} steps in a row were skipped: non-finite gradient", outcome.step,
                                 parts_.progress.skipped_in_a_row);
  if (!outcome.parameter.empty()) text += format_text(" in '{}'", outcome.parameter);
  if (outcome.rank >= 0) text += format_text(" of {}, in {}", parts_.channels.mesh().name(outcome.rank), outcome.phase);
  return text;
}

}  // namespace deeptide::engine
