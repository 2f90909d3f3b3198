// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a job on this machine in one loop over signals and the ranks' output.
#include "launch/job/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "launch/process/own_end.h"

namespace deeptide::launch {

namespace {

constexpr double kStarterGrace_s = 5.0;
constexpr std::chrono::milliseconds kSignalLimit{300};

}  // namespace

Supervisor::Supervisor(const Options& options, pid_t keeper)
    : options_(options),
      keeper_(keeper),
      signals_(keeper),
      output_(options),
      ranks_({[this](const auto& member, Stream stream, auto bytes) { output_.feed(member.id, stream, bytes); },
              [this](const auto& member) { on_exit(member); }}),
      host_watch_(ranks_, options.hang_timeout_s, [this](double waited_s) { on_late(waited_s); }),
      watch_(options, keeper != 0 ? keeper : getpid(),
             [this](const std::string& text) { output_.say(LogLevel::error, text); }) {
  terminal_.input = !isatty(STDIN_FILENO);  // reading from the terminal would stop a background process
  terminal_.output = options.share_terminal && options.log_dir.empty() && isatty(STDOUT_FILENO);
  terminal_.errors = options.share_terminal && options.log_dir.empty() && isatty(STDERR_FILENO);
}

int Supervisor::run(const std::vector<RankPlan>& plans, const std::string& what) {
  if (!what.empty()) output_.say(LogLevel::info, what);
  for (const RankPlan& plan : plans) ranks_.start(plan, add_output(plan.rank, rank_prefix(plan.rank)));
  watch_.watch({{"", plans.front().rank, static_cast<int>(plans.size()),
                 [this](const StateQuestion& question) {
                   host_watch_.ask(question, [this](const std::string& answer) { watch_.on_answer(0, answer); });
                 }}},
               std::stoi(plans.front().command.environment.at("WORLD_SIZE")));
  supervise();
  return finish();
}

int Supervisor::run_program(const Command& command, const std::string& name, RankHub& hub) {
  program_ = name;
  hub.serve(command.environment.at("DEEPTIDE_JOB_TOKEN"), watch_);
  hub_ = &hub;
  ranks_.start_program(0, command, add_output(0, ""));
  supervise();
  return finish();
}

void Supervisor::report_to(const std::string& hub, const std::string& token, const std::string& hello) {
  const auto on_asked = [this](const StateQuestion& question) {
    host_watch_.ask(question, [this](const std::string& answer) {
      if (link_) link_->send(FrameKind::states, answer);
    });
  };
  link_.emplace(hub, token, hello, HubLink::Events{on_asked, [this] { on_link_changed(); }});
}

void Supervisor::on_late(double waited_s) {
  late_s_ = waited_s;
  if (!link_ || !link_->up()) return watch_.on_late(0, waited_s);
  link_->send(FrameKind::late, encode(Late{waited_s}));
}

void Supervisor::on_link_changed() {
  if (link_->up()) watch_.on_late(0, 0.0);  // the launcher takes over the reports
  if (late_s_ > 0) on_late(late_s_);
}

int Supervisor::finish() {
  ranks_.finish();
  output_.finish();
  if (program_.empty()) failures_.print(output_);
  if (!program_.empty() && failures_.failed()) {
    output_.say(LogLevel::critical, program_ + " " + ranks_.members().front()->process.status()->text());
  }
  output_.flush();
  if (failures_.failed()) return failures_.exit_code();
  if (stop_signal_) return stopped_code();
  return output_.output_closed() ? 128 + SIGPIPE : 0;
}

int Supervisor::stopped_code() const {
  OwnEnd end;
  for (const auto& member : ranks_.members()) end.add(member->process.status().value_or(ExitStatus{}));
  return end.code().value_or(128 + *stop_signal_);
}

/// Prepares the output of the next process. The first process uses the terminal directly if that is allowed.
Terminal Supervisor::add_output(int id, const std::string& prefix) {
  const Terminal terminal = ranks_.members().empty() ? terminal_ : Terminal{};
  output_.add_rank(id, prefix, terminal_.output && terminal_.errors);
  return terminal;
}

void Supervisor::supervise() {
  while (!ranks_.all_ended()) {
    PollSet set;
    set.add(signals_.fd(), POLLIN, [this] {
      std::vector<int> arrived = signals_.read();
      // A starter signals both the rank and this process, so process a request before the rank's end.
      const auto is_request = [](int signal) { return signal != SIGCHLD; };
      if (options_.under_starter) {
        std::stable_partition(arrived.begin(), arrived.end(), is_request);
      }
      for (int signal : arrived) {
        on_signal(signal);
      }
    });
    ranks_.add_to(set, !output_.full());
    output_.add_to(set);
    host_watch_.add_to(set);
    watch_.add_to(set);
    if (hub_) hub_->add_to(set);
    if (link_) link_->add_to(set);
    set.wait();
    host_watch_.check();
    if (hub_) hub_->check();
    if (link_) link_->check();
    watch_.check();
    ranks_.check_deadline();
    if (!ranks_.asked_to_end() && output_.closed()) ranks_.stop(SIGTERM, options_.stop_grace_s());
  }
}

void Supervisor::on_signal(int signal) {
  if (signal == SIGCHLD) return ranks_.reap();
  if (signal == SIGTSTP) {
    ranks_.suspend();
    raise(SIGSTOP);
    host_watch_.forgive();
    return ranks_.resume();
  }
  if (signal == SIGUSR1 || signal == SIGUSR2) return ranks_.pass_on(signal);
  if (stop_signal_ == signal && Clock::now() - stopped_at_ < kSameSignal) return;
  if (stop_signal_ && program_.empty()) return ranks_.kill();
  if (stop_signal_) return ranks_.stop(SIGTERM, kStarterGrace_s);  // a killed starter would leave its ranks running
  stop_signal_ = signal;
  stopped_at_ = Clock::now();
  if (keeper_ != 0 && getppid() != keeper_) return ranks_.kill();  // the keeper was killed
  if (ranks_.asked_to_end()) return;
  if (signal == SIGINT) output_.say(LogLevel::info, "stopping; press ^C again to kill the ranks at once");
  // srun forwards SIGINT, but on SIGTERM it kills its ranks without a grace.
  const bool softly = signal == SIGINT || program_ == "srun";
  ranks_.stop(softly ? SIGINT : SIGTERM, options_.stop_grace_s());
}

void Supervisor::on_exit(const ProcessGroup::Member& member) {
  if (stop_signal_ || (member.ended_by_us && !failures_.failed())) return;
  // After a failure count only ranks that ended by themselves, not those that were asked to end.
  const ExitStatus& status = *member.process.status();
  if (options_.under_starter && status.signal == SIGTERM && is_asked_to_end()) return;
  if (member.ended_by_us && (status.signal == SIGTERM || ranks_.killing())) return;
  failures_.on_exit(member.id, "", status, num_running(), member.place());
  if (failures_.failed() && !ranks_.asked_to_end()) {
    ranks_.stop_soon(SIGTERM, options_.failure_grace_s());
  }
}

// srun may also send SIGTERM to the rank, which may end before this process receives its own signal.
bool Supervisor::is_asked_to_end() {
  pollfd ready{signals_.fd(), POLLIN, 0};
  const auto limit = Clock::now() + kSignalLimit;
  while (!stop_signal_ && Clock::now() < limit) {
    poll(&ready, 1, 10);
    for (const int signal : signals_.read()) {
      if (signal == SIGTERM) stop_signal_ = signal;
    }
  }
  return stop_signal_.has_value();
}

size_t Supervisor::num_running() const {
  return std::count_if(ranks_.members().begin(), ranks_.members().end(),
                       [](const auto& member) { return !member->process.status(); });
}

}  // namespace deeptide::launch
