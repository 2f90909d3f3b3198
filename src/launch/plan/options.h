// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The launcher's command line, parsed and checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/plan/hostfile.h"

namespace deeptide::launch {

/// How hosts are reached: agents over ssh or pdsh, or ranks through a resource manager's own starter.
enum class Transport : uint8_t { ssh, pdsh, openmpi, mpich, impi, slurm };

enum class LogLevel : uint8_t { debug, info, warning, error, critical };

/// What a host must know to start its ranks; the same on all hosts.
struct RankOptions {
  bool module = false;
  bool no_python = false;
  bool pass_local_rank = false;  // else: where a Python script names the option --local_rank
  bool no_local_rank = false;
  bool bind_cores = false;
  std::string bind_core_list;        // "0,2-5"; empty: all usable cores
  std::string python;                // empty: the virtual environment's, else PATH's python3
  std::vector<std::string> command;  // the script or program and its arguments, untouched
};

struct Options : RankOptions {
  std::string hostfile;  // empty: /job/hostfile if it is there
  HostFilter filter;
  int num_ranks = 0;    // --num_gpus; 0: one per visible device, else 1; with a hostfile all slots
  int master_port = 0;  // 0: a free one
  std::string master_addr;
  int node_rank = -1;
  bool no_ssh = false;
  bool no_ssh_check = false;
  int ssh_port = 0;  // 0: ssh's own choice
  std::optional<Transport> transport;
  std::string launcher_args;
  bool force_multi = false;
  bool save_pid = false;
  std::string venv_script;
  bool elastic = false;
  int min_elastic_nodes = -1;
  int max_elastic_nodes = -1;
  int max_restarts = 10;
  std::optional<double> grace_s;  // empty: 30 when the user stops the job, 5 after a failure
  double heartbeat_timeout_s = 5.0;
  double hang_timeout_s = 300.0;  // of a wait for a collective, before a report; 0: no reports
  LogLevel log_level = LogLevel::info;
  bool quiet = false;  // as log_level error
  bool dry_run = false;
  bool share_terminal = true;  // rank 0 may write to the terminal directly
  bool rank_prefix = true;     // ranks' lines begin with "[rank 3] "
  bool under_starter = false;  // mpirun or srun, which asks the other ranks' supervisors to end when one fails
  std::string log_dir;         // empty: ranks write to the launcher's output

  double stop_grace_s() const { return grace_s.value_or(30.0); }    // enough to finish a checkpoint
  double failure_grace_s() const { return grace_s.value_or(5.0); }  // the job is lost: enough to say why
};

/// Parses `arguments` (without the program's name). Returns the options, or nothing when --help or --version was
/// answered on standard output. Errors: UsageError.
std::optional<Options> parse_options(std::vector<std::string> arguments);

}  // namespace deeptide::launch
