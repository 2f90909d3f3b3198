// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Detects whether the kernel killed a process for lack of memory, which the process itself cannot report.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace deeptide::launch {

/// Watches the kernel's records from construction on.
class MemoryKills {
 public:
  MemoryKills();
  ~MemoryKills();
  MemoryKills(const MemoryKills&) = delete;
  MemoryKills& operator=(const MemoryKills&) = delete;

  /// True if the kernel's log names `pid`. If the log cannot be read: true if this process's control group, or else the
  /// machine, has counted such a kill since the last call. Sets `peak_bytes` to the log's figure, if it has one.
  bool killed(pid_t pid, int64_t& peak_bytes);

 private:
  int log_ = -1;         // /dev/kmsg
  int64_t counted_ = 0;  // kills seen so far
};

/// Parses one line of the kernel's log. Returns the resident bytes when it killed `pid`, or -1 for other lines.
int64_t resident_at_kill(const std::string& line, pid_t pid);

}  // namespace deeptide::launch
