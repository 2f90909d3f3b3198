// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The launcher's command line, parsed and checked.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace deeptide::launch {

/// The user asked for something that cannot be done; the text says what, and the cure.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

struct Options {
  int num_ranks = 0;    // 0: one per visible device, else 1
  int master_port = 0;  // 0: a free one
  bool module = false;
  bool no_python = false;
  bool pass_local_rank = false;
  bool no_local_rank = false;  // what happens anyway; here for DeepSpeed's users
  bool bind_cores = false;
  bool quiet = false;
  bool dry_run = false;
  double grace_s = 30.0;             // enough to finish a checkpoint
  std::string python;                // empty: the virtual environment's, else PATH's python3
  std::string log_dir;               // empty: ranks write to the launcher's output
  std::vector<std::string> command;  // the script or program and its arguments, untouched
};

/// Parses `arguments` (without the program's name). Returns the options, or nothing when --help or --version was
/// answered on standard output. Errors: UsageError.
std::optional<Options> parse_options(std::vector<std::string> arguments);

}  // namespace deeptide::launch
