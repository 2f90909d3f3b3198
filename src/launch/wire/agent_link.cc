// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges frames over a program's pipes or a socket, and records the reason when the connection breaks.
#include "launch/wire/agent_link.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

namespace deeptide::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLinkBeatInterval{500};
constexpr milliseconds kExitWait{500};
constexpr size_t kNoiseLines = 20;
constexpr int kExitNotFound = 127;

// Returns the exit code of a process that has closed its output and is about to exit; nothing if `limit` passes first.
std::optional<int> exit_code(Process& process, Clock::time_point limit) {
  while (!process.status()) {
    int status = 0;
    if (waitpid(process.pid(), &status, WNOHANG) == process.pid()) {
      process.record_exit(WIFSIGNALED(status) ? ExitStatus{0, WTERMSIG(status)} : ExitStatus{WEXITSTATUS(status), 0});
      break;
    }
    if (Clock::now() >= limit) return std::nullopt;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return process.status()->exit_code();
}

}  // namespace

AgentLink::AgentLink(Host host, const Events& events) : host_(std::move(host)), events_(events) {}

AgentLink::~AgentLink() {
  if (socket_ >= 0) ::close(socket_);
}

void AgentLink::connect_by(const std::vector<std::string>& command) {
  process_ = std::make_unique<Process>(Command{.words = command}, Terminal{.input_pipe = true});
  input_ = process_->output_fd();
  sink_ = std::make_unique<Sink>(process_->input_fd());
  forgive_silence();
}

void AgentLink::attach(int socket) {
  socket_ = input_ = socket;
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  sink_ = std::make_unique<Sink>(socket);
  forgive_silence();
}

void AgentLink::add_to(PollSet& set, bool with_output) {
  if (over() || input_ < 0) return;
  if (with_output) set.add(input_, POLLIN, [this] { read_frames(); });
  if (process_ && process_->errors_fd() >= 0) set.add(process_->errors_fd(), POLLIN, [this] { read_noise(); });
  if (!sink_->empty()) set.add(sink_->fd(), POLLOUT, [this] { sink_->write_some(); });
  set.wake_by(next_beat_);
}

void AgentLink::check_time(double timeout_s) {
  if (over() || input_ < 0) return;
  const auto now = Clock::now();
  if (live() && now - last_heard_ > std::chrono::duration<double>(timeout_s)) {
    return lose("was silent for " + std::to_string(static_cast<int>(timeout_s)) +
                " s: its network, its agent or the host itself has stopped");
  }
  if (now < next_beat_) return;
  next_beat_ = now + kLinkBeatInterval;
  if (live() && sink_->empty()) send(FrameKind::beat);
}

void AgentLink::send(FrameKind kind, std::string payload) {
  if (sink_ && !over()) sink_->push(encode({kind, -1, std::move(payload)}));
}

void AgentLink::lose(const std::string& why) {
  if (over()) return;
  state_ = State::lost;
  why_ = why;
  events_.changed(*this);
}

void AgentLink::read_frames() {
  char buffer[64 * 1024];
  const ssize_t got = ::read(input_, buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return on_closed();
  forgive_silence();
  reader_.feed({buffer, static_cast<size_t>(got)});
  try {
    while (const auto frame = reader_.next()) {
      handle(*frame);
      if (over()) return;
    }
  } catch (const std::exception& error) {
    lose(std::string("does not follow the agent protocol: ") + error.what());
  }
}

void AgentLink::handle(const Frame& frame) {
  if (frame.kind == FrameKind::hello) {
    const auto hello = decode<AgentHello>(frame.payload);
    if (hello.version != DEEPTIDE_VERSION) {
      return lose("has deeptide " + hello.version +
                  ", but this host has " DEEPTIDE_VERSION "; install the same version on all hosts");
    }
    addresses = hello.addresses;
    state_ = State::ready;
  } else if (frame.kind == FrameKind::refused) {
    state_ = State::refused;
    why_ = frame.payload;
    return events_.changed(*this);
  } else if (frame.kind == FrameKind::done) {
    state_ = State::ended;
  }
  events_.frame(*this, frame);
}

void AgentLink::read_noise() {
  char buffer[4096];
  const ssize_t got = ::read(process_->errors_fd(), buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    process_->close_errors();
    return;
  }
  for (char c : std::string_view(buffer, got)) {
    if (c == '\r') continue;
    if (c != '\n') {
      noise_ += c;
      continue;
    }
    events_.noise(*this, noise_);
    noises_.push_back(std::move(noise_));
    noise_.clear();
    if (noises_.size() > kNoiseLines) noises_.pop_front();
  }
}

void AgentLink::on_closed() {
  if (!process_) return lose("closed its connection: its agent was killed, or the host went down");
  const std::optional<int> code = exit_code(*process_, Clock::now() + kExitWait);
  while (process_->errors_fd() >= 0) {
    pollfd ready{process_->errors_fd(), POLLIN, 0};
    if (poll(&ready, 1, 0) <= 0) break;
    read_noise();
  }
  if (reader_.begun()) {
    return lose("closed its connection: its agent or its ssh was killed, or the host went down" +
                (noises_.empty() ? "" : " ('" + noises_.back() + "')"));
  }
  const std::string said = noises_.empty() ? reader_.noise() : noises_.back();
  const std::string told = said.empty() ? "" : ": " + said.substr(0, 300);
  if (code == kExitNotFound) {
    return lose("has no deeptide command, neither at the launcher's path nor in its PATH" + told +
                "; install the same version there, or name an environment with --venv_script");
  }
  lose("cannot be reached" + told + " (exit code " + std::to_string(code.value_or(-1)) +
       "); does `ssh -o BatchMode=yes " + host_.name + " true` work?");
}

void AgentLink::close(Clock::time_point limit) {
  if (!process_) return;
  // Waiting for a lost agent would only delay the launcher.
  if (state_ == State::lost) return;
  if (sink_) sink_->flush(limit);
  process_->close_input();
  exit_code(*process_, limit);
}

}  // namespace deeptide::launch
