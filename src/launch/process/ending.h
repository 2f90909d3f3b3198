// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides how processes end: time for their own failures, a request with a grace, then SIGKILL.
#pragma once

#include <cstdint>
#include <optional>

#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// The time after a failure in which other ranks may still fail on their own before they are asked to end.
inline constexpr std::chrono::milliseconds kLastWords{300};

/// Within this time a signal counts once: `timeout`, schedulers and terminals send it to a process and to its group.
inline constexpr std::chrono::milliseconds kSameSignal{1000};

/// Decides when to ask and when to kill: running -> warned -> stopping -> killing, never back.
/// Value type: holds no process and reads no clock. Its owner sends the signals or messages.
class Ending {
 public:
  using Time = Clock::time_point;
  enum class Phase : uint8_t { running, warned, stopping, killing };
  /// The owner's next action.
  enum class Due : uint8_t { nothing, stop, kill, give_up };
  struct Request {
    int signal = 0;
    double grace_s = 0.0;
  };
  struct Limits {
    Clock::duration slack{0};                            // added to the grace before the owner kills
    std::optional<Clock::duration> kill = std::nullopt;  // from the kill until the owner gives up; absent: never
  };

  Ending() = default;
  explicit Ending(const Limits& limits) : limits_(limits) {}

  /// Records a failure: `request` becomes due after kLastWords unless an earlier request arrives.
  /// Has no effect after the first failure or request.
  void warn(Time now, const Request& request);
  /// Records that the owner asks the processes to end with `request`; a later request restarts the grace. False if the
  /// processes are already being killed.
  bool stop(Time now, const Request& request);
  void kill(Time now);
  /// Enters the next phase if a deadline has passed and returns the owner's next action; for `stop` see request().
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
