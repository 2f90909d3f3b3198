// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Builds the command lines that reach other hosts.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/exports.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// Returns an ssh command that runs `remote`, a line for the shell of `host`. It never prompts for a password, limits
/// the time to connect, and includes --launcher_args.
std::vector<std::string> ssh_command(const Options& options, const std::string& host, const std::string& remote);

/// Returns this binary's path.
std::string own_path();

/// Returns a line for another host's shell: sources --venv_script, then executes this binary or PATH's `deeptide`.
std::string remote_line(const Options& options, const std::string& arguments);

/// Returns the command that starts the agent of one host: over ssh, or directly if the name means this machine.
std::vector<std::string> agent_command(const Options& options, const std::string& host);

/// Returns one pdsh command for all agents. They connect to `port` at the address that their ssh session came from.
std::vector<std::string> pdsh_command(const Options& options, const std::vector<Host>& hosts, int port);

/// Returns the mpirun or srun command that starts the ranks. Each runs `deeptide rank`, which finds its place in the
/// starter's variables. The command contains only the names in `exported`; the values stay in the environment.
/// Errors: UsageError if the starter cannot do what the options ask.
std::vector<std::string> starter_command(const Options& options, const std::vector<Host>& hosts,
                                         const std::vector<std::string>& exported);

/// Returns the variables that only the starter itself needs.
Environment starter_environment(const Options& options);

/// Returns the path of `program` in PATH. Errors: UsageError naming the --launcher that needs it.
std::string require_program(const std::string& program, const std::string& launcher);

}  // namespace deeptide::launch
