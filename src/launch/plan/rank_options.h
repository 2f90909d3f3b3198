// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds the options that every host of a job needs as one table, from which the parser, the command line of `deeptide
// rank` and the message to an agent are derived.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace deeptide::launch {

/// The options that a host needs to start and watch its ranks; equal on all hosts.
struct RankOptions {
  bool module = false;
  bool no_python = false;
  bool as_deepspeed = false;     // scripts find Deeptide's interface under the name of deepspeed
  std::string python;            // empty: the virtual environment's, else PATH's python3
  bool pass_local_rank = false;  // false: only for Python scripts that mention --local_rank
  bool no_local_rank = false;
  bool bind_cores = false;
  std::string bind_core_list;     // "0,2-5"; empty: all usable cores
  std::string log_dir;            // empty: ranks write to the launcher's output
  bool rank_prefix = true;        // ranks' lines begin with "[rank 3] "
  std::optional<double> grace_s;  // empty: 30 when the user stops the job, 5 after a failure
  double hang_timeout_s = 300.0;  // the wait for a collective that triggers a report; 0: no reports
  double heartbeat_timeout_s = 5.0;
  std::vector<std::string> command;  // the script or program and its arguments, unchanged

  double stop_grace_s() const { return grace_s.value_or(30.0); }    // enough to finish a checkpoint
  double failure_grace_s() const { return grace_s.value_or(5.0); }  // the job is lost: enough to report why
};

/// One option of the command line. A flag inverts the default of its member.
struct RankOption {
  enum class Group : bool { ranks, ending };  // of --help
  using Member = std::variant<bool RankOptions::*, std::string RankOptions::*, double RankOptions::*,
                              std::optional<double> RankOptions::*>;

  const char* flag;
  const char* value;  // its name in --help; null: a flag
  Member member;
  Group group;
  const char* help;
};

/// Returns all of RankOptions except the command, in the order of --help.
std::span<const RankOption> rank_options();

/// Returns words from which parse_options restores `options`: the options that differ from their defaults, then
/// `extra`, then the command.
std::vector<std::string> to_words(const RankOptions& options, const std::vector<std::string>& extra = {});

}  // namespace deeptide::launch
