// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whether the kernel killed a process for want of memory: a killed process cannot say so itself.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace deeptide::launch {

/// Watches the kernel's own records from its construction on.
class MemoryKills {
 public:
  MemoryKills();
  ~MemoryKills();
  MemoryKills(const MemoryKills&) = delete;
  MemoryKills& operator=(const MemoryKills&) = delete;

  /// True if the kernel's log names `pid`, or, where the log cannot be read, if the control group of this process (else
  /// the machine) has seen such a kill since the last question. `peak_bytes` becomes what the log says, if it does.
  bool killed(pid_t pid, int64_t& peak_bytes);

 private:
  int log_ = -1;         // /dev/kmsg
  int64_t counted_ = 0;  // kills that were there before
};

/// Of one line of the kernel's log: bytes that were resident when it killed `pid`; -1 if the line says nothing of it.
int64_t resident_at_kill(const std::string& line, pid_t pid);

}  // namespace deeptide::launch
