// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tries a pidfd, then /proc, then signal 0.
#include "host/process_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/text.h"

namespace deeptide::host {
namespace {

#ifndef SYS_pidfd_open
constexpr long SYS_pidfd_open = 434;  // Linux 5.3, on every architecture
#endif

/// The fields of /proc/<pid>/stat. `state` is 0 if it cannot be read.
struct Stat {
  char state = 0;
  std::string start_time;
};

Stat stat_of(int pid) {
  constexpr int kFieldsBeforeStartTime = 18;  // after the state
  const std::string line = first_line_of("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = line.rfind(')');  // the name may contain anything
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  Stat stat;
  std::string skipped;
  fields >> stat.state;
  for (int i = 0; i < kFieldsBeforeStartTime; ++i) fields >> skipped;
  fields >> stat.start_time;
  return stat;
}

bool has_exited(const Stat& stat) { return stat.state == 'Z' || stat.state == 'X'; }

bool is_no_process(int pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }

}  // namespace

ProcessWatch::ProcessWatch(int pid, WatchBy best) : pid_(pid) {
  if (best == WatchBy::descriptor) {
    descriptor_ = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    if (descriptor_ >= 0) return;
    was_gone_ = errno == ESRCH;
    why_not_ = std::string("pidfd_open: ") + std::strerror(errno);
    if (was_gone_) return;
  }
  by_ = WatchBy::start_time;
  const Stat stat = stat_of(pid);
  was_gone_ = has_exited(stat) || is_no_process(pid);
  start_time_ = stat.start_time;
  if (best != WatchBy::signal && !start_time_.empty()) return;
  by_ = WatchBy::signal;
  why_not_ += (why_not_.empty() ? "" : "; ") + std::string("/proc does not show process ") + std::to_string(pid);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(other.pid_),
      by_(other.by_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      start_time_(std::move(other.start_time_)),
      was_gone_(other.was_gone_),
      why_not_(std::move(other.why_not_)) {}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool ProcessWatch::has_ended() const {
  if (was_gone_) return true;
  if (by_ == WatchBy::descriptor) {
    pollfd entry{descriptor_, POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
  }
  if (is_no_process(pid_)) return true;
  if (by_ == WatchBy::signal) return false;
  const Stat stat = stat_of(pid_);
  // It may be out of descriptors, and so unable to read: the process is there, as far as the signal can tell.
  if (stat.start_time.empty()) return false;
  return has_exited(stat) || stat.start_time != start_time_;
}

}  // namespace deeptide::host
