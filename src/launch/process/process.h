// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A started program in a process group of its own, with its output on pipes or on the terminal.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "launch/plan/command.h"

namespace deeptide::launch {

/// The launcher's own streams that the program uses directly. Other outputs become pipes, another input reads
/// /dev/null.
struct Terminal {
  bool input = false;
  bool input_pipe = false;  // the launcher writes the input
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
  int exit_code() const { return signal ? 128 + signal : code; }  // as a shell reports it
  std::string text() const;                                       // "exited with code 3"
};

/// A started program and all that it starts in turn (its process group). Destruction kills and reaps what is left.
class Process {
 public:
  /// Errors: std::system_error naming the program if it cannot be executed.
  Process(const Command& command, const Terminal& terminal);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  int input_fd() const { return input_; }    // -1: not a pipe, or closed
  int output_fd() const { return output_; }  // -1: written directly, or at its end
  int errors_fd() const { return errors_; }
  void close_input();
  void close_output();
  void close_errors();

  /// Sends it to the program and its descendants; no effect once all are gone.
  void send_signal(int signal) const;
  /// Sends it to the program alone, if it still runs.
  void pass_on(int signal) const;
  /// True while any process of the group is left.
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
