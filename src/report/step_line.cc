// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The line that a run prints every few steps.

#include <cmath>

#include "base/libraries/format.h"
#include "base/log.h"
#include "report/reporter.h"

namespace deeptide::report {
namespace {

/// 12345 -> "12,345".
std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (auto place = static_cast<int64_t>(text.size()) - 3; place > 0; place -= 3)
    text.insert(static_cast<size_t>(place), ",");
  return text;
}

/// Hours, minutes and seconds: "1:02:03", or "0:12" without hours.
std::string clock_text(double seconds) {
  const auto all = static_cast<int64_t>(std::ceil(seconds));
  const int64_t hours = all / 3600, minutes = all / 60 % 60;
  return hours > 0 ? format_text("{}:{:02}:{:02}", hours, minutes, all % 60)
                   : format_text("{}:{:02}", minutes, all % 60);
}

/// One rate if all groups have the same.
std::string rates_text(const std::vector<Hyperparameters>& groups) {
  std::string text;
  bool are_equal = true;
  for (const Hyperparameters& group : groups) {
    are_equal = are_equal && group.lr() == groups.front().lr();
    text += format_text("{}{:.4g}", text.empty() ? "" : ", ", group.lr());
  }
  return are_equal && !groups.empty() ? format_text("{:.4g}", groups.front().lr()) : text;
}

}  // namespace

std::string step_line(const StepEnd& end, const LineFacts& facts) {
  const StepOutcome& outcome = end.outcome;
  std::string text = "step " + grouped(outcome.step);
  if (facts.total_steps > 0) text += "/" + grouped(facts.total_steps);
  if (!std::isnan(facts.loss)) text += format_text(" | loss {:.4g}", facts.loss);
  text += " | lr " + rates_text(end.groups) + format_text(" | norm {:.4g}", outcome.grad_norm);
  if (const double rate = facts.rates.samples_per_s; rate > 0.0) {
    text += " | " + (rate < 100.0 ? format_text("{:.3g}", rate) : grouped(std::llround(rate))) + " samples/s";
  }
  if (facts.total_steps > outcome.step && facts.rates.steps_per_s > 0.0) {
    const auto steps_left = static_cast<double>(facts.total_steps - outcome.step);
    text += " | " + clock_text(steps_left / facts.rates.steps_per_s) + " left";
  }
  if (end.skipped_steps > 0) text += " | " + grouped(end.skipped_steps) + " skipped";
  if (outcome.rounding > 0.0) {
    text += format_text(" | rounding {:.3g} (largest {:.3g} of its block's largest)", outcome.rounding,
                        outcome.largest_rounding);
  }
  return outcome.applied() ? text : text + " | " + outcome.reason;
}

}  // namespace deeptide::report
