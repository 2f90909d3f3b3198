// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reports which rank failed first and how, and prints equal errors of several ranks once.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/output/job_output.h"
#include "launch/process/process.h"

namespace deeptide::launch {

/// Collects the ends of a job's ranks and hosts, in the order in which they become known.
class FailureReport {
 public:
  /// Records a rank that ended before it was asked to. `host`: empty on this machine. `place`: see place_in().
  void on_exit(int rank, const std::string& host, const ExitStatus& status, size_t num_running,
               const std::string& place = "");
  /// Records a host that was lost with all its ranks; `text` is the reason.
  void on_lost_host(const std::string& host, const std::string& text);

  bool failed() const { return first_ || !lost_host_.empty(); }
  /// Returns the code of the first failure. A process killed by a signal takes precedence over failures that its loss
  /// may have caused, even if those were reported earlier.
  int exit_code() const;

  /// How the job failed, in one line.
  std::string verdict() const;
  /// Prints the last lines of the rank that failed, the errors of the other ranks, and the verdict.
  void print(JobOutput& output) const;

 private:
  struct Failure {
    int rank;
    std::string host, place;
    ExitStatus status;
    bool others_running;
  };

  std::optional<Failure> first_;
  Clock::time_point first_known_{};
  std::string lost_host_, lost_text_;
  std::vector<int> ended_early_;  // with code 0, while others ran
  std::vector<int> failed_;
};

/// Returns the line that names the error: the exception of a Python traceback, or the output of C++'s terminate().
std::optional<std::string> last_error(const std::deque<std::string>& lines);

/// Ranks whose errors are equal apart from numbers; the text is the first rank's.
struct SameError {
  std::string text;
  std::vector<int> ranks;
};
std::vector<SameError> group_errors(const std::map<int, std::string>& errors);

/// Returns ascending numbers as "0-3, 7".
std::string join_ranges(const std::vector<int>& numbers);

}  // namespace deeptide::launch
