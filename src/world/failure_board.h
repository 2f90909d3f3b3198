// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges reports after a failure: which rank failed, which ranks wait, which never arrived.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "deeptide/world.h"

namespace deeptide::world {

/// Interval at which a wait checks for reports of other ranks.
inline constexpr std::chrono::milliseconds kPollFailures{250};

/// Lives in the world's store; used only on failure and by long waits. Thread-safe.
class FailureBoard {
 public:
  FailureBoard(const World& world, const std::string& prefix);

  /// Reports that this rank cannot continue ("left training", "failed in forward: …"), and what ended it, if that was
  /// noted. Never throws.
  void report_failure(const std::string& text) noexcept;
  /// Notes what ends this rank: a rank that looks later finds its report alone. The first cause stays.
  void note_cause(const std::string& cause) noexcept;
  /// Returns another rank's report, e.g. "rank 1 left training at step 3"; empty while there is none.
  std::optional<std::string> failure() noexcept;
  /// Records the place where this rank timed out, then returns the places of all others and the missing ranks.
  std::string diagnose(const std::string& own_place) noexcept;

 private:
  std::string key(const std::string& kind, int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int rank_;
  int size_;
  std::mutex mutex_;
  std::string cause_;
};

}  // namespace deeptide::world
