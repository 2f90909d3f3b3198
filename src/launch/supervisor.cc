// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The launcher's one loop: poll over signals and the ranks' output.
#include "launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>

namespace deeptide::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStragglerGrace{200};
constexpr milliseconds kFlushLimit{5000};
// On a terminal, what a progress bar of rank 0 left on the line goes away before another rank's line.
constexpr const char* kClearLine = "\r\033[K";

int open_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP}) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

bool same_file(int a, int b) {
  struct stat first, second;
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

std::string log_path(const std::string& folder, int rank) {
  char stamp[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(stamp, sizeof(stamp), "%Y%m%d%H%M%S", std::localtime(&now));
  return folder + "/" + stamp + "_rank" + std::to_string(rank) + ".log";
}

int open_log(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) throw UsageError("cannot write the log '" + path + "': " + std::generic_category().message(errno));
  return fd;
}

// Reads once; false at the end of the stream.
bool read_stream(int fd, LineSplitter& lines) {
  char buffer[64 * 1024];
  const ssize_t got = read(fd, buffer, sizeof(buffer));
  if (got > 0) lines.feed({buffer, static_cast<size_t>(got)});
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

}  // namespace

struct Supervisor::Rank {
  int rank;
  std::string log;  // path; empty: shown
  RankProcess process;
  LineSplitter output;
  LineSplitter errors;

  void read_output() {
    if (read_stream(process.output_fd(), output)) return;
    output.finish();
    process.close_output();
  }
  void read_errors() {
    if (read_stream(process.errors_fd(), errors)) return;
    errors.finish();
    process.close_errors();
  }
};

Supervisor::Supervisor(const Options& options) : options_(options), signal_fd_(open_signals()) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);         // what ranks leave behind comes here to be reaped
  terminal_.input = !isatty(STDIN_FILENO);  // the terminal's input would stop a background process
  terminal_.output = options.log_dir.empty() && isatty(STDOUT_FILENO);
  terminal_.errors = options.log_dir.empty() && isatty(STDERR_FILENO);
  sinks_.push_back(std::make_unique<Sink>(STDOUT_FILENO));
  output_ = errors_ = sinks_.back().get();
  if (!same_file(STDOUT_FILENO, STDERR_FILENO)) {
    sinks_.push_back(std::make_unique<Sink>(STDERR_FILENO));
    errors_ = sinks_.back().get();
  }
}

Supervisor::~Supervisor() {
  ranks_.clear();
  for (const auto& sink : sinks_) {
    if (sink->fd() > STDERR_FILENO) close(sink->fd());
  }
  close(signal_fd_);
}

int Supervisor::run(const std::vector<RankPlan>& plans) {
  if (!options_.quiet) {
    const auto& environment = plans.front().environment;
    say(std::to_string(plans.size()) + (plans.size() == 1 ? " rank" : " ranks") + " on this machine, meeting at port " +
        environment.at("MASTER_PORT"));
  }
  if (!options_.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options_.log_dir, error);
    if (error) throw UsageError("cannot make the folder '" + options_.log_dir + "': " + error.message());
  }
  for (const RankPlan& plan : plans) start(plan);
  supervise();
  sweep_stragglers();
  drain_output();
  report();
  for (const auto& sink : sinks_) sink->flush(Clock::now() + kFlushLimit);
  if (first_failed_) return first_failed_->process.status()->exit_code();
  if (stop_signal_) return 128 + *stop_signal_;
  return output_->closed() ? 128 + SIGPIPE : 0;
}

void Supervisor::start(const RankPlan& plan) {
  const bool direct = plan.rank == 0;
  const Terminal terminal{direct && terminal_.input, direct && terminal_.output, direct && terminal_.errors};
  std::string prefix = "[rank " + std::to_string(plan.rank) + "] ";
  Sink* output = output_;
  Sink* errors = errors_;
  std::string log;
  if (!options_.log_dir.empty()) {
    log = log_path(options_.log_dir, plan.rank);
    sinks_.push_back(std::make_unique<Sink>(open_log(log)));
    output = errors = sinks_.back().get();
    prefix.clear();
  }
  const std::string clear = terminal_.output && terminal_.errors ? kClearLine : "";
  ranks_.push_back(std::unique_ptr<Rank>(
      new Rank{plan.rank, log, {plan, terminal}, {clear + prefix, *output}, {clear + prefix, *errors}}));
  guard_.watch(ranks_.back()->process.pid());
}

void Supervisor::supervise() {
  while (!all_ended()) {
    wait_for_events();
    if (phase_ == Phase::stopping && Clock::now() >= deadline_) kill_all();
    if (phase_ == Phase::running && (output_->closed() || errors_->closed())) stop_all(SIGTERM);
  }
}

void Supervisor::wait_for_events() {
  std::vector<pollfd> polled{{signal_fd_, POLLIN, 0}};
  std::vector<std::function<void()>> handlers{[this] { read_signals(); }};
  const bool full = std::any_of(sinks_.begin(), sinks_.end(), [](const auto& sink) { return sink->full(); });
  for (const auto& rank : ranks_) {
    if (full) break;  // the ranks wait until what they wrote is taken
    Rank* r = rank.get();
    if (r->process.output_fd() >= 0) {
      polled.push_back({r->process.output_fd(), POLLIN, 0});
      handlers.push_back([r] { r->read_output(); });
    }
    if (r->process.errors_fd() >= 0) {
      polled.push_back({r->process.errors_fd(), POLLIN, 0});
      handlers.push_back([r] { r->read_errors(); });
    }
  }
  for (const auto& sink : sinks_) {
    if (sink->empty()) continue;
    polled.push_back({sink->fd(), POLLOUT, 0});
    handlers.push_back([s = sink.get()] { s->write_some(); });
  }
  int timeout = -1;
  if (phase_ == Phase::stopping) {
    const auto left = std::chrono::ceil<milliseconds>(deadline_ - Clock::now()).count();
    timeout = static_cast<int>(std::clamp<long>(left, 0, 3'600'000));
  }
  if (poll(polled.data(), polled.size(), timeout) <= 0) return;
  for (size_t i = 0; i < polled.size(); ++i) {
    if (polled[i].revents) handlers[i]();
  }
}

void Supervisor::read_signals() {
  signalfd_siginfo info;
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo == SIGCHLD) {
      reap();
    } else if (info.ssi_signo == SIGTSTP) {
      suspend();
    } else {
      on_stop_request(static_cast<int>(info.ssi_signo));
    }
  }
}

void Supervisor::on_stop_request(int signal) {
  if (stop_signal_) return kill_all();
  stop_signal_ = signal;
  if (phase_ != Phase::running) return;
  if (!options_.quiet && signal == SIGINT) say("stopping; ^C again kills the ranks at once");
  stop_all(signal == SIGINT ? SIGINT : SIGTERM);
}

void Supervisor::reap() {
  int wait_status = 0;
  while (true) {
    const pid_t pid = waitpid(-1, &wait_status, WNOHANG);
    if (pid <= 0) return;
    for (const auto& rank : ranks_) {
      if (rank->process.pid() != pid) continue;
      rank->process.record_exit(wait_status);
      on_exit(*rank);
    }
  }
}

void Supervisor::on_exit(const Rank& rank) {
  if (phase_ != Phase::running || !rank.process.status()->failed()) return;
  first_failed_ = &rank;
  others_were_running_ = !all_ended();
  stop_all(SIGTERM);
}

void Supervisor::stop_all(int signal) {
  phase_ = Phase::stopping;
  deadline_ =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.grace_s));
  signal_all(signal);
  signal_all(SIGCONT);  // a stopped process would not see it
}

void Supervisor::kill_all() {
  phase_ = Phase::killing;
  signal_all(SIGKILL);
}

void Supervisor::suspend() {
  signal_all(SIGSTOP);
  raise(SIGSTOP);
  signal_all(SIGCONT);
}

void Supervisor::signal_all(int signal) {
  for (const auto& rank : ranks_) rank->process.send_signal(signal);
}

bool Supervisor::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->process.status().has_value(); });
}

// Processes that ranks left in their groups: they get a moment to end by themselves, then TERM, then KILL.
void Supervisor::sweep_stragglers() {
  const auto wait_until_gone = [this](Clock::time_point limit) {
    while (true) {
      reap();
      const bool alive =
          std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->process.group_alive(); });
      if (!alive) return true;
      if (Clock::now() >= limit) return false;
      std::this_thread::sleep_for(milliseconds(5));
    }
  };
  if (phase_ != Phase::killing && !wait_until_gone(Clock::now() + kStragglerGrace)) {
    signal_all(SIGTERM);
    wait_until_gone(Clock::now() + kStragglerGrace);
  }
  signal_all(SIGKILL);
  wait_until_gone(Clock::now() + kStragglerGrace);
  for (const auto& rank : ranks_) guard_.release(rank->process.pid());
}

void Supervisor::drain_output() {
  for (const auto& rank : ranks_) {
    // What a pipe holds is at most its capacity: nobody fills it any more.
    for (int fd = rank->process.output_fd(); fd >= 0; fd = rank->process.output_fd()) {
      pollfd ready{fd, POLLIN, 0};
      if (poll(&ready, 1, 0) <= 0)
        rank->process.close_output();
      else
        rank->read_output();
    }
    for (int fd = rank->process.errors_fd(); fd >= 0; fd = rank->process.errors_fd()) {
      pollfd ready{fd, POLLIN, 0};
      if (poll(&ready, 1, 0) <= 0)
        rank->process.close_errors();
      else
        rank->read_errors();
    }
    rank->output.finish();
    rank->errors.finish();
  }
}

void Supervisor::report() {
  if (!first_failed_) return;
  if (!first_failed_->log.empty()) {
    say("the last lines of rank " + std::to_string(first_failed_->rank) + " (all of them: " + first_failed_->log +
        "):");
    for (const std::string& line : first_failed_->errors.tail()) errors_->push("  " + line + "\n");
  }
  say("rank " + std::to_string(first_failed_->rank) + " " + first_failed_->process.status()->text() +
      (others_were_running_ ? "; the others were stopped" : ""));
}

void Supervisor::say(const std::string& text) { errors_->push("[deeptide] " + text + "\n"); }

}  // namespace deeptide::launch
