// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the kernel's log and the counters of control groups.
#include "launch/process/memory_kills.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace deeptide::launch {
namespace {

// Returns the number after `name` in a file of lines `name number`; -1 if it has none.
int64_t counter(const std::string& path, const std::string& name) {
  std::ifstream stream(path);
  std::string word;
  int64_t value = 0;
  while (stream >> word >> value) {
    if (word == name) return value;
  }
  return -1;
}

// Returns the path in the line of /proc/self/cgroup for `controller`.
std::string own_group(const std::string& controller) {
  std::ifstream stream("/proc/self/cgroup");
  for (std::string line; std::getline(stream, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (line.substr(first + 1, second - first - 1) == controller) return line.substr(second + 1);
  }
  return {};
}

// Counts the kills in this process's control group (version 2, then 1), or on the machine if it has neither.
int64_t count_kills() {
  const std::string files[] = {"/sys/fs/cgroup" + own_group("") + "/memory.events",
                               "/sys/fs/cgroup/memory" + own_group("memory") + "/memory.oom_control", "/proc/vmstat"};
  for (const std::string& file : files) {
    const int64_t count = counter(file, "oom_kill");
    if (count >= 0) return count;
  }
  return 0;
}

int64_t kibibytes_after(const std::string& line, const std::string& key) {
  const size_t at = line.find(key);
  return at == std::string::npos ? 0 : std::atoll(line.c_str() + at + key.size());
}

}  // namespace

int64_t resident_at_kill(const std::string& line, pid_t pid) {
  const size_t at = line.find("Killed process " + std::to_string(pid) + " (");
  if (at == std::string::npos) return -1;
  int64_t total = 0;
  for (const char* key : {"anon-rss:", "file-rss:", "shmem-rss:"}) total += kibibytes_after(line, key);
  return total * 1024;
}

MemoryKills::MemoryKills() : log_(open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC)), counted_(count_kills()) {
  if (log_ >= 0) lseek(log_, 0, SEEK_END);
}

MemoryKills::~MemoryKills() {
  if (log_ >= 0) close(log_);
}

bool MemoryKills::killed(pid_t pid, int64_t& peak_bytes) {
  char line[8192];
  // Each read returns one record.
  for (ssize_t got; log_ >= 0 && (got = read(log_, line, sizeof(line) - 1)) > 0;) {
    line[got] = '\0';
    const int64_t resident = resident_at_kill(line, pid);
    if (resident < 0) continue;
    counted_ = count_kills();
    if (resident > 0) peak_bytes = resident;
    return true;
  }
  // In a container the log has other process ids, or cannot be read.
  const int64_t now = count_kills();
  const bool more = now > counted_;
  counted_ = now;
  return more;
}

}  // namespace deeptide::launch
