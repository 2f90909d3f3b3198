// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How much memory the control groups of this process (a container's limit) still allow.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace deeptide::device {

/// A limit on memory, and what is left within it. Units: bytes.
struct MemoryLimit {
  std::string group;  // "/sys/fs/cgroup/job"
  int64_t limit = 0;
  int64_t left = 0;  // file caches count as free, and so does swap that the group may use
};

/// Returns the limit of which least is left, among this process's group and its ancestors; nothing without limits, or
/// where the control groups cannot be read. Beyond it the kernel does not refuse memory: it kills a process.
/// `groups`: the text of /proc/self/cgroup; `root`: where the groups are mounted; `free_swap`: the machine's.
std::optional<MemoryLimit> tightest_memory_limit(const std::string& groups, const std::string& root, int64_t free_swap);
/// The same for this process.
std::optional<MemoryLimit> tightest_memory_limit();

}  // namespace deeptide::device
