// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One rank as a process: in its own group, with its output on pipes or on the terminal.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "launch/plan/rank_plan.h"

namespace deeptide::launch {

/// Which of the launcher's own streams the rank uses directly; the other outputs are pipes, the other input is empty.
struct Terminal {
  bool input = false;
  bool input_pipe = false;  // an input that the launcher writes
  bool output = false;
  bool errors = false;
};

/// How a process ended: its exit code, or the signal that killed it.
struct ExitStatus {
  int code = 0;
  int signal = 0;
  int64_t peak_bytes = 0;      // resident, of the process itself
  bool out_of_memory = false;  // the kernel killed it for that

  bool failed() const { return code != 0 || signal != 0; }
  int exit_code() const { return signal ? 128 + signal : code; }  // as a shell tells it
  std::string text() const;                                       // "exited with code 3"
};

/// A started rank and all that it starts in turn (its process group). Destruction kills and reaps what is left.
class RankProcess {
 public:
  /// Errors: std::system_error naming the program if it cannot be executed.
  RankProcess(const RankPlan& plan, const Terminal& terminal);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  pid_t pid() const { return pid_; }
  int input_fd() const { return input_; }    // -1: not a pipe, or closed
  int output_fd() const { return output_; }  // -1: written directly, or at its end
  int errors_fd() const { return errors_; }
  void close_input();
  void close_output();
  void close_errors();

  /// To the rank and its descendants; no effect once all are gone.
  void send_signal(int signal) const;
  /// To the rank alone, if it still runs.
  void pass_on(int signal) const;
  /// True while any process of the rank's group is left.
  bool group_alive() const;

  void record_exit(const ExitStatus& status) { status_ = status; }
  const std::optional<ExitStatus>& status() const { return status_; }

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  int errors_ = -1;
  std::optional<ExitStatus> status_;
};

}  // namespace deeptide::launch
