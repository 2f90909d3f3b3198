// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges what differs, where anything does.
#include "engine/step/step_terms.h"

#include <algorithm>

#include "base/libraries/format.h"
#include "base/log.h"

namespace deeptide::engine {

using comm::Close;
using comm::Verdict;

bool StepTerms::follow_leader(const std::vector<Verdict>& verdicts, const std::vector<Close>& closes) {
  const auto equal = [&](const Verdict& v) { return v.hyperparameters == verdicts.front().hyperparameters; };
  if (std::all_of(verdicts.begin(), verdicts.end(), equal)) return false;
  std::vector<Hyperparameters>& groups = progress_.hyperparameters;
  std::vector<double> own;
  for (const Hyperparameters& group : groups) {
    for (size_t i = 0; i < group.optimizer()->hyperparameters.size(); ++i) own.push_back(group[i]);
  }
  const auto all =
      boundary_.exchange_all(std::span<const double>(own), {"step", "comparing hyper-parameters with the other ranks"});
  warn_of_difference(all, closes);
  size_t next = static_cast<size_t>(&leading(closes) - closes.data()) * own.size();
  for (Hyperparameters& group : groups) {
    for (size_t i = 0; i < group.optimizer()->hyperparameters.size(); ++i) group.set_at(i, all[next++]);
  }
  return true;
}

/// Ranks that have joined no longer set theirs: that they differ is expected.
void StepTerms::warn_of_difference(const std::vector<double>& values, const std::vector<Close>& closes) {
  if (told_of_difference_) return;
  const auto leader = static_cast<size_t>(&leading(closes) - closes.data());
  const size_t count = values.size() / closes.size();
  const auto& ranks = channels_.data().ranks();
  for (size_t rank = 0; rank < closes.size(); ++rank) {
    size_t at = 0;
    for (size_t group = 0; !closes[rank].joined && group < progress_.hyperparameters.size(); ++group) {
      for (const auto& info : progress_.hyperparameters[group].optimizer()->hyperparameters) {
        const double here = values[leader * count + at], there = values[rank * count + at];
        ++at;
        if (here == there) continue;
        told_of_difference_ = true;
        if (channels_.data().index() > 0) return;
        const std::string first = channels_.mesh().name(ranks[leader]);
        return log(LogLevel::warning,
                   format_text("{} of optimizer group {} is {} on {} and {} on {}: all ranks step with "
                               "{}'s. Set hyper-parameters equally on every rank, e.g. from a reduced metric",
                               info.name, group, here, first, there, channels_.mesh().name(ranks[rank]), first));
      }
    }
  }
}

zero::ActiveParameters StepTerms::agree_on_active(const std::vector<Verdict>& verdicts,
                                                  const std::vector<sharding::Unit*>& trainable) {
  const auto all = [](const Verdict& verdict) { return verdict.has_seen_all; };
  if (std::any_of(verdicts.begin(), verdicts.end(), all)) return {};
  const auto own = reducer_->seen();
  const auto seen = boundary_.exchange_all(std::span<const uint8_t>(own),
                                           {"step", "agreeing on the parameters that have a gradient"});
  zero::ActiveParameters active;
  size_t next = 0;
  for (const auto* unit : trainable) {
    auto& flags = active.by_unit.emplace_back(unit->parameters().size(), false);
    for (size_t p = 0; p < flags.size(); ++p, ++next) {
      for (size_t at = next; at < seen.size(); at += own.size()) flags[p] = flags[p] || seen[at] != 0;
    }
  }
  // A parameter that was replaced is no longer reached: look, but not at every step.
  if (active.by_unit != reached_) live_.look();
  reached_ = active.by_unit;
  return active;
}

}  // namespace deeptide::engine
