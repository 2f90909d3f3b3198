// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a program in its own process group, with its output on pipes or on the terminal.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "launch/plan/command.h"

namespace deeptide::launch {

/// The launcher's streams that the program uses directly. Other outputs become pipes; without an input it reads
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
  int64_t peak_bytes = 0;      // resident memory of the process itself
  bool out_of_memory = false;  // the kernel killed it for lack of memory

  bool failed() const { return code != 0 || signal != 0; }
  int exit_code() const { return signal ? 128 + signal : code; }  // as a shell reports it
  std::string text() const;                                       // "exited with code 3"
};

/// A program and all processes that it starts in turn (its process group). Destruction kills and reaps the rest.
class Process {
 public:
  /// Errors: std::system_error naming the program if it cannot be executed.
  Process(const Command& command, const Terminal& terminal);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  int input_fd() const { return input_; }    // -1: not a pipe, or closed
  int output_fd() const { return output_; }  // -1: written directly, or closed
  int errors_fd() const { return errors_; }
  void close_input();
  void close_output();
  void close_errors();

  /// Sends `signal` to the program and its descendants; no effect once all are gone.
  void send_signal(int signal) const;
  /// Sends `signal` to the program alone, if it still runs.
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
