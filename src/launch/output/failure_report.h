// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Who failed first, how, and with which words; ranks that say the same are told once.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/output/job_output.h"
#include "launch/process/rank_process.h"

namespace deeptide::launch {

/// The ends of a job's ranks and hosts, in the order in which they became known.
class FailureReport {
 public:
  /// A rank that ended before it was asked to. `host`: empty on this machine.
  void on_exit(int rank, const std::string& host, const ExitStatus& status, size_t num_running);
  /// A host that was lost with all its ranks; `text` says how.
  void on_lost_host(const std::string& host, const std::string& text);

  bool failed() const { return first_ || !lost_host_.empty(); }
  /// Of the first failure. A process that a signal killed explains those that fail for want of it, even if their ends
  /// were heard of first.
  int exit_code() const;

  /// The last lines of the rank that failed, what the others said, the verdict.
  void print(JobOutput& output) const;

 private:
  struct Failure {
    int rank;
    std::string host;
    ExitStatus status;
    bool others_running;
  };

  std::string verdict() const;

  std::optional<Failure> first_;
  Clock::time_point first_known_{};
  std::string lost_host_, lost_text_;
  std::vector<int> ended_early_;  // with code 0, while others ran
  std::vector<int> failed_;
};

/// The line that says what went wrong: the exception of a Python traceback, or what C++'s terminate() printed.
std::optional<std::string> last_error(const std::deque<std::string>& lines);

/// Ranks by what they said, numbers within the text aside; the text is the first rank's.
struct SameError {
  std::string text;
  std::vector<int> ranks;
};
std::vector<SameError> group_errors(const std::map<int, std::string>& errors);

/// "0-3, 7" of ascending numbers.
std::string join_ranges(const std::vector<int>& numbers);

}  // namespace deeptide::launch
