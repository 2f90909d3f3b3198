// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints the ranks' lines to the terminal or to log files, the launcher's messages and the failure report.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launch/output/line_splitter.h"
#include "launch/plan/options.h"
#include "launch/process/process.h"
#include "launch/process/process_group.h"
#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// "[rank 3] ".
std::string rank_prefix(int rank);

class JobOutput {
 public:
  explicit JobOutput(const Options& options);
  ~JobOutput();
  JobOutput(const JobOutput&) = delete;
  JobOutput& operator=(const JobOutput&) = delete;

  /// Opens the rank's log, or, without logs, prefixes its lines with `prefix` unless --no_rank_prefix is given.
  /// `clear_line`: another rank writes to the same terminal. Errors: UsageError if the log cannot be written.
  void add_rank(int rank, std::string prefix, bool clear_line);
  /// Empty `bytes`: end of the stream.
  void feed(int rank, Stream stream, std::string_view bytes);
  /// Ends unfinished lines of all ranks.
  void finish();
  /// Forgets the ranks before a restart; logs continue in new files.
  void forget_ranks();

  /// Prints a message of the launcher if its level is at least --log_level.
  void say(LogLevel level, const std::string& text);
  void print(const std::string& line) { errors_->push(line + "\n"); }

  /// Returns the last lines of the rank's standard error or, if that is empty, of its output.
  const std::deque<std::string>& tail(int rank) const;
  /// Returns the path of the rank's log; empty: its lines were printed.
  const std::string& log(int rank) const;
  size_t num_ranks() const { return ranks_.size(); }

  void add_to(PollSet& set);
  bool full() const;  // the ranks block until their output is read
  bool closed() const { return output_->closed() || errors_->closed(); }
  bool output_closed() const { return output_->closed(); }
  void flush();

 private:
  struct Rank {
    std::string log;
    LineSplitter output, errors;
  };

  std::string log_dir_;
  bool rank_prefix_;
  bool quiet_;  // rank 0 speaks for the job, without a prefix
  LogLevel level_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // output, errors (if it is another file), then one per log file
  Sink* output_;
  Sink* errors_;
  std::map<int, Rank> ranks_;
};

}  // namespace deeptide::launch
