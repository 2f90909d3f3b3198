// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How processes are brought to an end: last words, a request within a grace, then SIGKILL.
#pragma once

#include <cstdint>
#include <optional>

#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// After a failure, the time in which other ranks may still fail by themselves before they are asked to end.
constexpr std::chrono::milliseconds kLastWords{300};

/// Decides when to ask and when to kill: running -> warned -> stopping -> killing, never back.
/// A value: holds no process and reads no clock. Its owner sends the signals or messages.
class Ending {
 public:
  using Time = Clock::time_point;
  enum class Phase : uint8_t { running, warned, stopping, killing };
  /// What the owner must do now.
  enum class Due : uint8_t { nothing, stop, kill, give_up };
  struct Request {
    int signal = 0;
    double grace_s = 0.0;
  };
  struct Limits {
    Clock::duration slack{0};                            // beyond the grace, before the owner kills
    std::optional<Clock::duration> kill = std::nullopt;  // after that it gives up; absent: never
  };

  Ending() = default;
  explicit Ending(const Limits& limits) : limits_(limits) {}

  /// A failure: `request` becomes due after kLastWords, unless an earlier request comes. No effect once warned.
  void warn(Time now, const Request& request);
  /// The owner asks the processes to end as `request` says; a later request restarts the grace. False if it is too
  /// late: they are being killed.
  bool stop(Time now, const Request& request);
  void kill(Time now);
  /// Moves on if a deadline has passed, and returns what that means for the owner; for `stop` see request().
  Due check(Time now);

  Phase phase() const { return phase_; }
  bool asked() const { return phase_ == Phase::stopping || phase_ == Phase::killing; }
  const Request& request() const { return request_; }
  const std::optional<Time>& deadline() const { return deadline_; }

 private:
  Limits limits_;
  Phase phase_ = Phase::running;
  Request request_;
  std::optional<Time> deadline_;  // of the phase
};

}  // namespace deeptide::launch
