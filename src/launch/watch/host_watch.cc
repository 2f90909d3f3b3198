// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the rings periodically, which costs the ranks nothing.
#include "launch/watch/host_watch.h"

#include <algorithm>
#include <system_error>

#include "launch/watch/hang_report.h"

namespace deeptide::launch {
namespace {

using std::chrono::duration;

// Returns a tenth of the timeout, within bounds.
Clock::duration pause_of(double timeout_s) {
  return std::chrono::duration_cast<Clock::duration>(duration<double>(std::clamp(timeout_s / 10, 0.05, 10.0)));
}

/// Includes ranks that have ended, because others may wait for them.
std::vector<RankState> read_states(const ProcessGroup& ranks) {
  std::vector<RankState> states;
  for (const auto& member : ranks.members()) {
    if (!member->flight) continue;
    states.push_back(read_state(member->id, member->process.pid(), *member->flight));
    if (member->process.status()) states.back().process = 'Z';  // another process may have its id by now
  }
  return states;
}

}  // namespace

HostWatch::HostWatch(const ProcessGroup& ranks, double timeout_s, OnLate on_late)
    : ranks_(ranks), timeout_s_(timeout_s), on_late_(std::move(on_late)) {}

void HostWatch::add_to(PollSet& set) {
  if (timeout_s_ > 0) set.wake_by(next_check_);
  if (collector_) set.add(collector_->fd(), POLLIN, [this] { check_collector(); });
}

void HostWatch::check() {
  if (timeout_s_ <= 0 || Clock::now() < next_check_) return;
  next_check_ = Clock::now() + pause_of(timeout_s_);
  const double since_forgiven = duration<double>(Clock::now() - forgiven_).count();
  const double waited = std::min(longest_wait(read_states(ranks_)), since_forgiven);
  const bool late = waited >= timeout_s_;
  if (late != late_) on_late_(late ? waited : 0.0);
  late_ = late;
}

void HostWatch::ask(const StateQuestion& question, OnAnswer on_answer) {
  if (question.stacks_of.empty()) return on_answer(encode(StateAnswer{question.id, answer_at_once(question)}));
  questions_.push_back({question, std::move(on_answer)});
  collect();
}

/// Passes on what the question asks of the ranks; what they do about it shows in later answers.
std::vector<RankState> HostWatch::answer_at_once(const StateQuestion& question) const {
  std::vector<RankState> states = read_states(ranks_);
  auto state = states.begin();
  for (const auto& member : ranks_.members()) {
    if (!member->flight) continue;
    if (question.trace_number != 0) {
      member->flight->ask_timeline(question.trace_number, question.trace_steps, question.trace_folder);
    }
    if (question.watch_s > 0) {
      state->last_step = read_last_step(*member->flight);
      member->flight->watch(question.watch_s);
    }
    ++state;
  }
  return states;
}

void HostWatch::collect() {
  while (!collector_ && !questions_.empty()) {
    try {
      collector_ = std::make_unique<StackCollector>(ranks_, questions_.front().question);
    } catch (const std::system_error&) {  // out of processes or descriptors: omit the stacks, continue the job
      answer_first("");
    }
  }
}

void HostWatch::check_collector() {
  if (!collector_->read()) return;
  answer_first(collector_->answer());
  collector_.reset();
  collect();
}

/// An empty `answer` means that the collector could not start, or was killed.
void HostWatch::answer_first(const std::string& answer) {
  const Asked asked = std::move(questions_.front());
  questions_.pop_front();
  asked.on_answer(answer.empty() ? encode(StateAnswer{asked.question.id, {}}) : answer);
}

}  // namespace deeptide::launch
