// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parses and checks the launcher's command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/rank_options.h"

namespace deeptide::launch {

/// Reaches hosts through agents over ssh or pdsh, or through a resource manager's own starter of ranks.
enum class Transport : uint8_t { ssh, pdsh, openmpi, mpich, impi, slurm };

enum class LogLevel : uint8_t { debug, info, warning, error, critical };

/// All options. Those of RankOptions are sent to every host.
struct Options : RankOptions {
  std::string hostfile;  // empty: /job/hostfile if it exists
  HostFilter filter;
  int num_ranks = 0;    // --num_gpus; 0: one per visible device, else 1; with a hostfile all slots
  int master_port = 0;  // 0: a free port
  std::string master_addr;
  int node_rank = -1;
  bool no_ssh = false;
  bool no_ssh_check = false;
  int ssh_port = 0;  // 0: ssh's default
  std::optional<Transport> transport;
  std::string launcher_args;
  bool force_multi = false;
  bool save_pid = false;
  std::string venv_script;
  bool elastic = false;
  int min_elastic_nodes = -1;
  int max_elastic_nodes = -1;
  int max_restarts = 10;
  LogLevel log_level = LogLevel::info;
  bool quiet = false;  // as log_level error
  bool dry_run = false;
  std::string misplaced;       // an option of the launcher that stands after the script, which does not mention it
  std::string autotuning;      // tune or run: search for the fastest configuration; run: train with it
  bool share_terminal = true;  // rank 0 may write to the terminal directly
  bool under_starter = false;  // mpirun or srun asks the other ranks' supervisors to end when a rank fails
};

/// Parses `arguments` (without the program's name). Returns the options, or nothing after printing the answer to --help
/// or --version. Errors: UsageError.
std::optional<Options> parse_options(std::vector<std::string> arguments);

}  // namespace deeptide::launch
