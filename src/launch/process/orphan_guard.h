// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts a small process that outlives a killed launcher just long enough to kill the ranks.
#pragma once

#include <sys/types.h>

namespace deeptide::launch {

/// While it lives, each watched process group dies with this process, even if this process is killed with SIGKILL.
/// The parent-death signal reaches a rank itself but not the rank's own children (data loaders, shells' commands).
class OrphanGuard {
 public:
  OrphanGuard();
  ~OrphanGuard();
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;

  pid_t pid() const { return pid_; }
  /// `grace`: gives the group time to end by itself before it is killed.
  void watch(pid_t group, bool grace = false);
  void release(pid_t group);

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
};

}  // namespace deeptide::launch
