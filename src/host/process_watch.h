// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells whether another process of this host has ended, on kernels and in containers that hide processes as well.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide::host {

/// Ways to see a process end, best first.
enum class WatchBy : uint8_t {
  descriptor,  // pidfd: of that very process
  start_time,  // /proc/<pid>/stat: a process of the same number began at another time
  signal,      // kill(pid, 0): sees neither zombies nor that the number has another owner
};

/// Watches a process of the same PID namespace from its construction on. Movable.
class ProcessWatch {
 public:
  /// `best`: ways better than this are not tried.
  explicit ProcessWatch(int pid, WatchBy best = WatchBy::descriptor);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&&) = delete;

  int pid() const { return pid_; }
  WatchBy by() const { return by_; }
  /// Why a better way could not be taken: "pidfd_open: Function not implemented"; empty if none is better.
  const std::string& why_not() const { return why_not_; }
  /// This process itself has never ended.
  bool has_ended() const;

 private:
  int pid_;
  WatchBy by_ = WatchBy::descriptor;
  int descriptor_ = -1;
  std::string start_time_;
  bool was_gone_ = false;  // before the watch began
  std::string why_not_;
};

}  // namespace deeptide::host
