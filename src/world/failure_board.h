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
  /// Reports that this rank ends in good order, unless a cause was noted. Never throws.
  void report_end(const std::string& text) noexcept;
  /// Notes what ends this rank: a rank that looks later finds its report alone. The first cause stays.
  void note_cause(const std::string& cause) noexcept;
  /// Returns another rank's report, e.g. "rank 1 left training at step 3"; empty while there is none. If that rank
  /// ended because others gave no report, names those that have given none by now. A rank that waits gives its own
  /// place, which it records if another one asks for it.
  std::optional<std::string> failure(const std::string& own_place = "") noexcept;
  /// Whether a rank reported more than its end in good order: what this rank waits for will not come.
  bool is_failure() noexcept;
  /// Records the place where this rank timed out or lost a peer and asks for the others' places; returns those that
  /// came and the missing ranks. Takes up to half a second.
  std::string diagnose(const std::string& own_place) noexcept;

 private:
  void report(const std::string& text, bool in_good_order);
  std::string key(const std::string& kind, int rank) const;
  struct Reports {
    std::string places;   // "; rank 0: waits: …" for each rank that gave its own
    std::string missing;  // the others: "1, 2"
  };
  Reports read_reports();

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int rank_;
  int size_;
  std::mutex mutex_;
  std::string cause_;
  bool unexplained_ = false;  // the cause is that ranks gave no report
};

}  // namespace deeptide::world
