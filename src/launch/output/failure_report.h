// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which rank failed first, how, and with which last words; equal errors of several ranks are printed once.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/output/job_output.h"
#include "launch/process/process.h"

namespace deeptide::launch {

/// The ends of a job's ranks and hosts, in the order in which they became known.
class FailureReport {
 public:
  /// A rank that ended before it was asked to. `host`: empty on this machine.
  void on_exit(int rank, const std::string& host, const ExitStatus& status, size_t num_running);
  /// A host that was lost with all its ranks; `text` is the reason.
  void on_lost_host(const std::string& host, const std::string& text);

  bool failed() const { return first_ || !lost_host_.empty(); }
  /// The code of the first failure. A process killed by a signal explains others that fail because it is gone, even if
  /// their ends were reported earlier.
  int exit_code() const;

  /// Prints the last lines of the rank that failed, the errors of the others, and the verdict.
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

/// The line that names the error: the exception of a Python traceback, or what C++'s terminate() printed.
std::optional<std::string> last_error(const std::deque<std::string>& lines);

/// Groups ranks by their error, ignoring numbers within it; the text is the first rank's.
struct SameError {
  std::string text;
  std::vector<int> ranks;
};
std::vector<SameError> group_errors(const std::map<int, std::string>& errors);

/// "0-3, 7" of ascending numbers.
std::string join_ranges(const std::vector<int>& numbers);

}  // namespace deeptide::launch
