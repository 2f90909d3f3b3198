// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looking into the rings now and then, which costs the ranks nothing.
#include "launch/hang_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "launch/hang_report.h"
#include "launch/rank_stacks.h"

namespace deeptide::launch {
namespace {

// A tenth of the timeout, within bounds.
Clock::duration pause_of(double timeout_s) {
  const double seconds = std::clamp(timeout_s / 10, 0.05, 10.0);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f s", seconds);
  return text;
}

}  // namespace

std::vector<RankState> read_states(const RankGroup& ranks, bool with_stacks) {
  std::vector<RankState> states;
  const auto& members = ranks.members();
  for (const auto& member : members) {
    if (!member->process.status()) states.push_back(read_state(member->rank, member->process.pid(), member->flight));
  }
  if (!with_stacks) return states;
  const std::vector<int> shown = ranks_to_show(states);
  for (RankState& state : states) {
    if (std::find(shown.begin(), shown.end(), state.rank) == shown.end()) continue;
    const auto member =
        std::find_if(members.begin(), members.end(), [&](const auto& m) { return m->rank == state.rank; });
    state.stacks = collect_stacks(state.pid, (*member)->flight);
  }
  return states;
}

HangWatch::HangWatch(States states, double timeout_s, std::string command, std::function<void(const std::string&)> say)
    : states_(std::move(states)),
      timeout_s_(timeout_s),
      command_(std::move(command)),
      say_(std::move(say)),
      socket_([this](const std::string& request) { return answer(request); }),
      next_check_(Clock::now()) {}

void HangWatch::add_to(PollSet& set) {
  socket_.add_to(set);
  if (timeout_s_ > 0) set.wake_by(next_check_);
}

void HangWatch::check() {
  if (timeout_s_ <= 0 || Clock::now() < next_check_) return;
  next_check_ = Clock::now() + pause_of(timeout_s_);
  const double waited = longest_wait(states_(false));
  if (waited < timeout_s_) {
    reported_ = false;
  } else if (!reported_) {
    reported_ = true;
    say_("no collective has ended for " + seconds_text(waited) + " (--hang_timeout); who waits for whom:\n" +
         hang_report(states_(true)));
  }
}

std::string HangWatch::answer(const std::string& request) {
  if (request == "stacks") return hang_report(states_(true));
  const std::vector<RankState> states = states_(false);
  const double age = std::chrono::duration<double>(Clock::now() - started_).count();
  int64_t step = 0;
  for (const RankState& state : states) step = std::max(step, state.step);
  return std::to_string(getpid()) + "\t" + std::to_string(states.size()) + "\t" + std::to_string(step) + "\t" +
         seconds_text(longest_wait(states)) + "\t" + seconds_text(age) + "\t" + command_ + "\n";
}

}  // namespace deeptide::launch
