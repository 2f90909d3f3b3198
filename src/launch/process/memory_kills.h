// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whether the kernel killed a process for lack of memory: a killed process cannot report it.
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

  /// True if the kernel's log names `pid`, or, where the log cannot be read, if the control group of this process (else
  /// the machine) has counted such a kill since the last call. `peak_bytes` becomes the log's figure, if it has one.
  bool killed(pid_t pid, int64_t& peak_bytes);

 private:
  int log_ = -1;         // /dev/kmsg
  int64_t counted_ = 0;  // kills before that
};

/// Parses one line of the kernel's log: the bytes resident when it killed `pid`, or -1 if the line is about something
/// else.
int64_t resident_at_kill(const std::string& line, pid_t pid);

}  // namespace deeptide::launch
