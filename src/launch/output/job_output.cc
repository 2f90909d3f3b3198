// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes all output of a job through one queue per file.
#include "launch/output/job_output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <system_error>

#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr std::chrono::milliseconds kJobFlushLimit{5000};
// Clears a progress bar of rank 0 from the terminal's line before another rank's line is printed.
constexpr const char* kClearLine = "\r\033[K";

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

}  // namespace

JobOutput::JobOutput(const Options& options)
    : log_dir_(options.log_dir),
      rank_prefix_(options.rank_prefix),
      quiet_(options.quiet && !options.under_starter),
      level_(options.log_level) {
  sinks_.push_back(std::make_unique<Sink>(STDOUT_FILENO));
  output_ = errors_ = sinks_.back().get();
  if (!same_file(STDOUT_FILENO, STDERR_FILENO)) {
    sinks_.push_back(std::make_unique<Sink>(STDERR_FILENO));
    errors_ = sinks_.back().get();
  }
  if (log_dir_.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(log_dir_, error);
  if (error) throw UsageError("cannot create the folder '" + log_dir_ + "': " + error.message());
}

JobOutput::~JobOutput() {
  for (const auto& sink : sinks_) {
    if (sink->fd() > STDERR_FILENO) close(sink->fd());
  }
}

std::string rank_prefix(int rank) { return "[rank " + std::to_string(rank) + "] "; }

void JobOutput::add_rank(int rank, std::string prefix, bool clear_line) {
  if (!rank_prefix_ || (quiet_ && rank == 0)) prefix.clear();
  if (clear_line && rank_prefix_) prefix = kClearLine + prefix;
  Sink* output = output_;
  Sink* errors = errors_;
  std::string log;
  if (!log_dir_.empty()) {
    log = log_path(log_dir_, rank);
    sinks_.push_back(std::make_unique<Sink>(open_log(log)));
    output = errors = sinks_.back().get();
    prefix.clear();
  }
  ranks_.erase(rank);
  ranks_.emplace(rank, Rank{log, {prefix, *output}, {prefix, *errors}});
}

void JobOutput::feed(int rank, Stream stream, std::string_view bytes) {
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return;
  LineSplitter& lines = stream == Stream::output ? found->second.output : found->second.errors;
  if (bytes.empty()) {
    lines.finish();
  } else {
    lines.feed(bytes);
  }
}

void JobOutput::finish() {
  for (auto& [rank, lines] : ranks_) {
    lines.output.finish();
    lines.errors.finish();
  }
}

void JobOutput::forget_ranks() {
  finish();
  ranks_.clear();
  while (sinks_.back()->fd() > STDERR_FILENO) {
    sinks_.back()->flush(Clock::now() + kJobFlushLimit);
    close(sinks_.back()->fd());
    sinks_.pop_back();
  }
}

void JobOutput::say(LogLevel level, const std::string& text) {
  if (level >= level_) print("[deeptide] " + text);
}

const std::deque<std::string>& JobOutput::tail(int rank) const {
  const Rank& lines = ranks_.at(rank);
  return lines.errors.tail().empty() ? lines.output.tail() : lines.errors.tail();
}

const std::string& JobOutput::log(int rank) const { return ranks_.at(rank).log; }

void JobOutput::add_to(PollSet& set) {
  for (const auto& sink : sinks_) {
    if (!sink->empty()) set.add(sink->fd(), POLLOUT, [s = sink.get()] { s->write_some(); });
  }
}

bool JobOutput::full() const {
  return std::any_of(sinks_.begin(), sinks_.end(), [](const auto& sink) { return sink->full(); });
}

void JobOutput::flush() {
  for (const auto& sink : sinks_) sink->flush(Clock::now() + kJobFlushLimit);
}

}  // namespace deeptide::launch
