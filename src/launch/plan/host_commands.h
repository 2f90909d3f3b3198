// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The command lines that reach other hosts.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/exports.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// ssh to `host` running `remote`, a line for its shell: no password prompts, a bounded time to connect, then
/// --launcher_args.
std::vector<std::string> ssh_command(const Options& options, const std::string& host, const std::string& remote);

/// This binary's path.
std::string own_path();

/// A line for another host's shell: reads --venv_script, then becomes this binary there, or PATH's `deeptide`.
std::string remote_line(const Options& options, const std::string& arguments);

/// The agent of one host: over ssh, or directly where the name means this machine.
std::vector<std::string> agent_command(const Options& options, const std::string& host);

/// All agents through one pdsh; they connect to `port` of the address that their ssh session came from.
std::vector<std::string> pdsh_command(const Options& options, const std::vector<Host>& hosts, int port);

/// Ranks through mpirun or srun; each runs `deeptide rank`, which finds its place in the starter's variables.
/// Variables of `exported` are named, their values stay in this process's environment.
/// Errors: UsageError if the starter cannot do what the options ask.
std::vector<std::string> starter_command(const Options& options, const std::vector<Host>& hosts,
                                         const std::vector<std::string>& exported);

/// Variables that only the starter itself needs.
Environment starter_environment(const Options& options);

/// The path of `program` in PATH. Errors: UsageError naming the --launcher that needs it.
std::string require_program(const std::string& program, const std::string& launcher);

}  // namespace deeptide::launch
