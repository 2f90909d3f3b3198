// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs the agent's loop over the launcher's frames, the ranks' output and ends, and heartbeats in both directions.
#include "launch/job/agent.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "launch/machine/machine.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr milliseconds kBeatInterval{500};
constexpr double kStartTimeout_s = 120.0;  // from hello to start, because other hosts may connect slowly
constexpr double kLostGrace_s = 3.0;       // short, because the ranks' last output has no reader
constexpr milliseconds kFlushLimit{3000};

}  // namespace

Agent::Agent(int input, int output)
    : input_(input),
      sink_(output),
      ranks_({[this](const auto& member, Stream stream, auto bytes) {
                send(stream == Stream::output ? FrameKind::output : FrameKind::errors, member.id, std::string(bytes));
              },
              [this](const auto& member) { on_exit(member); }}),
      timeout_s_(kStartTimeout_s) {
  fcntl(input, F_SETFL, fcntl(input, F_GETFL) | O_NONBLOCK);
  fcntl(output, F_SETFL, fcntl(output, F_GETFL) | O_NONBLOCK);
}

int Agent::run() {
  sink_.push(kPreamble);
  send(FrameKind::hello, -1, encode(AgentHello{DEEPTIDE_VERSION, own_addresses()}));
  while (state_ != State::refused) {
    if (state_ == State::waiting && !connected_) return 1;
    if (state_ == State::running && ranks_.all_ended()) break;
    serve_once();
  }
  ranks_.finish();
  if (state_ == State::running) send(FrameKind::done);
  if (connected_) sink_.flush(Clock::now() + kFlushLimit);
  return connected_ && state_ == State::running ? 0 : 1;
}

void Agent::serve_once() {
  PollSet set;
  set.add(signals_.fd(), POLLIN, [this] {
    for (int signal : signals_.read()) on_signal(signal);
  });
  if (connected_) set.add(input_, POLLIN, [this] { read_frames(); });
  if (connected_ && !sink_.empty()) set.add(sink_.fd(), POLLOUT, [this] { sink_.write_some(); });
  ranks_.add_to(set, !sink_.full());
  if (connected_) set.wake_by(next_beat_);
  if (watch_) watch_->add_to(set);
  set.wait();
  if (watch_) watch_->check();
  ranks_.check_deadline();
  if (!connected_) return;
  if (sink_.closed()) return on_lost_launcher();
  check_silence();
  if (Clock::now() < next_beat_) return;
  next_beat_ = Clock::now() + kBeatInterval;
  if (sink_.empty()) send(FrameKind::beat);
}

void Agent::read_frames() {
  char buffer[64 * 1024];
  const ssize_t got = read(input_, buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return on_lost_launcher();
  last_heard_ = Clock::now();
  reader_.feed({buffer, static_cast<size_t>(got)});
  try {
    while (const auto frame = reader_.next()) handle(*frame);
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void Agent::handle(const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::prepare:
      return prepare(decode<PortRequest>(frame.payload));
    case FrameKind::start:
      return start(decode<AgentJob>(frame.payload));
    case FrameKind::stop:
      return stop(decode<Ending::Request>(frame.payload));
    case FrameKind::kill:
      if (state_ == State::waiting) return refuse("stopped before the start");
      return ranks_.kill();
    case FrameKind::suspend:
      suspended_ = true;
      return ranks_.suspend();
    case FrameKind::resume:
      suspended_ = false;
      if (watch_) watch_->forgive();
      return ranks_.resume();
    case FrameKind::ask:
      if (!watch_) return;
      return watch_->ask(decode<StateQuestion>(frame.payload),
                         [this](const std::string& answer) { send(FrameKind::states, -1, answer); });
    default:
      return;  // a heartbeat, or a kind of a later version
  }
}

void Agent::prepare(const PortRequest& wanted) {
  port_ = wanted.fixed ? HeldPort::choose(wanted.port) : HeldPort::first_free(wanted.port);
  send(FrameKind::port, -1, encode(PortAnswer{port_.number()}));
}

void Agent::start(const AgentJob& job) {
  if (state_ != State::waiting) return;
  failure_grace_s_ = job.options.failure_grace_s();
  timeout_s_ = job.options.heartbeat_timeout_s;
  if (chdir(job.folder.c_str()) != 0) {
    throw UsageError("cannot change to the folder '" + job.folder + "': " + std::generic_category().message(errno) +
                     "; the working folder must exist on every host");
  }
  const std::vector<RankPlan> plans = plan_ranks(job.options, job.place);
  state_ = State::running;
  for (const RankPlan& plan : plans) ranks_.start(plan, Terminal{});
  watch_.emplace(ranks_, job.options.hang_timeout_s,
                 [this](double waited_s) { send(FrameKind::late, -1, encode(Late{waited_s})); });
}

void Agent::stop(const Ending::Request& request) {
  if (state_ == State::waiting) return refuse("stopped before the start");
  if (!ranks_.asked_to_end()) ranks_.stop(request.signal, request.grace_s);
}

void Agent::on_exit(const ProcessGroup::Member& member) {
  const ExitStatus& status = *member.process.status();
  send(FrameKind::exited, member.id, encode(RankExit{status, member.ended_by_us && !signalled_, member.place()}));
  if (status.failed() && !ranks_.asked_to_end()) ranks_.stop_soon(SIGTERM, failure_grace_s_);
}

void Agent::on_signal(int signal) {
  if (signal == SIGCHLD) return ranks_.reap();
  if (signal == SIGTSTP) return;  // the launcher sends `suspend`
  if (state_ == State::waiting) return refuse("the agent was stopped by signal " + std::to_string(signal));
  if (ranks_.asked_to_end()) return ranks_.kill();
  signalled_ = true;  // the launcher did not ask, so it must count these ends as failures
  ranks_.stop(SIGTERM, failure_grace_s_);
}

void Agent::on_lost_launcher() {
  connected_ = false;
  if (state_ == State::running && !ranks_.killing()) ranks_.stop(SIGTERM, kLostGrace_s);
}

void Agent::check_silence() {
  if (suspended_) return;
  const double silent = duration<double>(Clock::now() - last_heard_).count();
  if (silent > timeout_s_) on_lost_launcher();
}

void Agent::send(FrameKind kind, int rank, std::string payload) {
  if (connected_) sink_.push(encode({kind, rank, std::move(payload)}));
}

void Agent::refuse(const std::string& why) {
  ranks_.kill();
  send(FrameKind::refused, -1, why);
  state_ = State::refused;
}

}  // namespace deeptide::launch
