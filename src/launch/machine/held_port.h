// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A TCP port of this machine where a job's ranks meet, kept for them from before they start.
#pragma once

#include <string>
#include <utility>

namespace deeptide::launch {

/// Bound, but not listening: no other program is given the port for a connection of its own, and rank 0 may listen
/// there as torch's store does, with SO_REUSEADDR. A name that goes with the number keeps other launchers away. Held
/// for as long as the object lives.
class HeldPort {
 public:
  HeldPort() = default;
  ~HeldPort();
  HeldPort(HeldPort&& other) noexcept
      : number_(std::exchange(other.number_, 0)),
        socket_(std::exchange(other.socket_, -1)),
        name_(std::exchange(other.name_, -1)) {}
  HeldPort& operator=(HeldPort&& other) noexcept;

  /// Holds `wanted`, or a free port if it is 0.
  /// Errors: UsageError naming the port and, if visible, the process that listens there.
  static HeldPort choose(int wanted);

  /// Holds the first free port from `first` on, or any if the next hundred are busy. Errors: as choose(0).
  static HeldPort first_free(int first);

  /// 0: none.
  int number() const { return number_; }

 private:
  int hold(int wanted, bool alone);

  int number_ = 0;
  int socket_ = -1;
  int name_ = -1;  // an abstract socket; -1: another launcher's
};

}  // namespace deeptide::launch
