// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads output through poll and ends through waitpid; sends TERM, then KILL, to processes that remain.
#include "launch/process/process_group.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "launch/process/keeper.h"

namespace deeptide::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStragglerGrace{200};
constexpr milliseconds kStarterGrace{5000};
constexpr int64_t kBytesPerMaxrss = 1024;

ExitStatus to_status(int wait_status, const rusage& usage) {
  ExitStatus status;
  if (WIFSIGNALED(wait_status)) {
    status.signal = WTERMSIG(wait_status);
  } else {
    status.code = WEXITSTATUS(wait_status);
  }
  status.peak_bytes = usage.ru_maxrss * kBytesPerMaxrss;
  return status;
}

}  // namespace

ProcessGroup::ProcessGroup(Events events) : events_(std::move(events)) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // this process adopts and reaps orphans of the ranks
}

void ProcessGroup::start(const RankPlan& plan, const Terminal& terminal) {
  FlightFiles flight;
  Command watched = plan.command;
  watched.inherited = {flight.ring_fd(), flight.stacks_fd()};
  for (const auto& [name, value] : flight.environment()) watched.environment[name] = value;
  add(plan.rank, std::move(flight), watched, terminal);
}

void ProcessGroup::start_program(int id, const Command& command, const Terminal& terminal) {
  add(id, std::nullopt, command, terminal);
}

void ProcessGroup::add(int id, std::optional<FlightFiles> flight, const Command& command, const Terminal& terminal) {
  members_.push_back(
      std::unique_ptr<Member>(new Member{id, std::move(flight), {command, terminal}, command.starts_ranks}));
  guard_.watch(members_.back()->process.pid(), command.starts_ranks);
}

void ProcessGroup::add_to(PollSet& set, bool with_output) {
  if (ending_.deadline()) set.wake_by(*ending_.deadline());
  for (const auto& member : members_) {
    if (!with_output) return;
    Member* m = member.get();
    if (m->process.output_fd() >= 0) set.add(m->process.output_fd(), POLLIN, [this, m] { read(*m, Stream::output); });
    if (m->process.errors_fd() >= 0) set.add(m->process.errors_fd(), POLLIN, [this, m] { read(*m, Stream::errors); });
  }
}

void ProcessGroup::check_deadline() {
  const Ending::Due due = ending_.check(Clock::now());
  if (due == Ending::Due::stop) ask_to_end();
  if (due == Ending::Due::kill) signal_all(SIGKILL);
}

void ProcessGroup::read(Member& member, Stream stream) {
  char buffer[64 * 1024];
  const int fd = stream == Stream::output ? member.process.output_fd() : member.process.errors_fd();
  const ssize_t got = ::read(fd, buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) return events_.output(member, stream, {buffer, static_cast<size_t>(got)});
  close(member, stream);
}

void ProcessGroup::close(Member& member, Stream stream) {
  if (stream == Stream::output) {
    member.process.close_output();
  } else {
    member.process.close_errors();
  }
  events_.output(member, stream, {});
}

void ProcessGroup::reap() {
  int wait_status = 0;
  rusage usage{};
  while (true) {
    const pid_t pid = wait4(-1, &wait_status, WNOHANG, &usage);
    if (pid <= 0) return;
    for (const auto& member : members_) {
      if (member->process.pid() != pid || member->process.status()) continue;
      ExitStatus status = to_status(wait_status, usage);
      if (status.signal == SIGKILL && !killing()) {
        status.out_of_memory = memory_kills_.killed(pid, status.peak_bytes);
      }
      member->ended_by_us = asked_to_end() && !status.out_of_memory;
      member->process.record_exit(status);
      events_.exited(*member);
    }
  }
}

void ProcessGroup::stop(int signal, double grace_s) {
  if (ending_.stop(Clock::now(), {signal, grace_s})) ask_to_end();
}

void ProcessGroup::ask_to_end() {
  signal_all(ending_.request().signal);
  signal_all(SIGCONT);  // a stopped process would not receive the request
}

void ProcessGroup::stop_soon(int signal, double grace_s) { ending_.warn(Clock::now(), {signal, grace_s}); }

void ProcessGroup::kill() {
  ending_.kill(Clock::now());
  signal_all(SIGKILL);
}

void ProcessGroup::suspend() { signal_all(SIGSTOP); }

void ProcessGroup::resume() { signal_all(SIGCONT); }

void ProcessGroup::pass_on(int signal) const {
  for (const auto& member : members_) member->process.pass_on(signal);
}

void ProcessGroup::signal_all(int signal) {
  for (const auto& member : members_) member->process.send_signal(signal);
}

bool ProcessGroup::all_ended() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& member) { return member->process.status(); });
}

bool ProcessGroup::wait_until_gone(Clock::time_point limit) {
  while (true) {
    reap();
    const bool alive =
        std::any_of(members_.begin(), members_.end(), [](const auto& member) { return member->process.group_alive(); });
    if (!alive) return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

void ProcessGroup::finish() {
  // Remaining processes get a moment to end by themselves, then TERM, then KILL. A killed srun leaves a process behind
  // that ends its ranks.
  const bool starter = std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m->starts_ranks; });
  if (starter) wait_until_gone(Clock::now() + kStarterGrace);
  if (!killing() && !wait_until_gone(Clock::now() + kStragglerGrace)) {
    signal_all(SIGTERM);
    wait_until_gone(Clock::now() + kStragglerGrace);
  }
  signal_all(SIGKILL);
  wait_until_gone(Clock::now() + kStragglerGrace);
  kill_adopted();
  for (const auto& member : members_) {
    guard_.release(member->process.pid());
    drain(*member, Stream::output);
    drain(*member, Stream::errors);
  }
}

// This process has adopted those that left their group (daemons, new sessions) when their parents ended.
void ProcessGroup::kill_adopted() {
  kill_children([this](int pid) {
    return pid == guard_.pid() || std::any_of(members_.begin(), members_.end(), [pid](const auto& member) {
             return member->process.pid() == pid && !member->process.status();
           });
  });
}

void ProcessGroup::drain(Member& member, Stream stream) {
  const auto fd = [&] { return stream == Stream::output ? member.process.output_fd() : member.process.errors_fd(); };
  while (fd() >= 0) {
    pollfd ready{fd(), POLLIN, 0};
    // All writers are gone, so the pipe holds at most its capacity.
    if (poll(&ready, 1, 0) > 0) {
      read(member, stream);
    } else {
      close(member, stream);
    }
  }
}

}  // namespace deeptide::launch
