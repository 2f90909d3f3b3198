// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Where ranks leave word for each other when something has gone wrong: who failed, who waits, who never came.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "deeptide/world.h"

namespace deeptide::world {

/// How often a wait looks for what others report.
inline constexpr std::chrono::milliseconds kPollFailures{250};

/// Lives in the world's store; touched only on failure and by waits that have lasted long. Thread-safe.
class FailureBoard {
 public:
  FailureBoard(const World& world, const std::string& prefix);

  /// Says that this rank cannot go on ("left training", "failed in forward: …"). Never throws.
  void report_failure(const std::string& text) noexcept;
  /// Another rank's report, e.g. "rank 1 left training at step 3"; empty while all is well.
  std::optional<std::string> failure() noexcept;
  /// Says where this rank has waited in vain, then tells what every other rank said: who waits where, who is missing.
  std::string diagnose(const std::string& own_place) noexcept;

 private:
  std::string key(const std::string& kind, int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int rank_;
  int size_;
};

}  // namespace deeptide::world
