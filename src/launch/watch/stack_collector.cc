// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Forks a child with one thread per queried rank, so that a rank that cannot answer does not delay the others.
#include "launch/watch/stack_collector.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "launch/watch/rank_stacks.h"

namespace deeptide::launch {
namespace {

constexpr unsigned kLimit_s = 10;  // far above the time limit for one rank

[[noreturn]] void collect(const ProcessGroup& ranks, const StateQuestion& question, int pipe) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(kLimit_s);
  std::vector<const ProcessGroup::Member*> asked;
  for (const auto& member : ranks.members()) {
    const bool wanted = std::count(question.stacks_of.begin(), question.stacks_of.end(), member->id) > 0;
    if (wanted && member->flight && !member->process.status()) asked.push_back(member.get());
  }
  StateAnswer answer{question.id, std::vector<RankState>(asked.size())};
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < asked.size(); ++i) {
      threads.emplace_back([&state = answer.states[i], member = asked[i]] {
        state = read_state(member->id, member->process.pid(), *member->flight);
        state.stacks = collect_stacks(state.pid, *member->flight);
      });
    }
  }
  const std::string text = encode(answer);
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t now = write(pipe, text.data() + sent, text.size() - sent);
    if (now <= 0) break;
    sent += static_cast<size_t>(now);
  }
  _exit(0);
}

}  // namespace

StackCollector::StackCollector(const ProcessGroup& ranks, const StateQuestion& question) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  const pid_t child = fork();
  if (child == 0) collect(ranks, question, ends[1]);
  const int error = errno;
  close(ends[1]);
  pipe_ = ends[0];
  fcntl(pipe_, F_SETFL, O_NONBLOCK);
  if (child > 0) return;  // reaped with the ranks, and ended with them if it still runs
  close(pipe_);
  throw std::system_error(error, std::generic_category(), "fork");
}

StackCollector::~StackCollector() { close(pipe_); }

bool StackCollector::read() {
  char buffer[16 * 1024];
  const ssize_t got = ::read(pipe_, buffer, sizeof buffer);
  if (got > 0) answer_.append(buffer, static_cast<size_t>(got));
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace deeptide::launch
