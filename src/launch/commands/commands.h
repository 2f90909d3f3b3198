// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One function per command of `deeptide NAME …`; the table is in main.cc.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

struct Options;

/// The words after the command's name. Each function answers its own --help.
using Arguments = std::vector<std::string>;

/// `deeptide [options] script args…`: what runs when the first word names no command.
int run_job(const Arguments& arguments);
/// The same for options that are parsed already.
int run_job(Options options);

/// `deeptide agent`: one host's part of a job, started by the launcher.
int run_agent(const Arguments& arguments);

/// `deeptide rank script args…`: one rank under mpirun or srun, started by the launcher.
int run_rank(const Arguments& arguments);

/// `deeptide ssh command…`: a command on all hosts.
int run_ssh(const Arguments& arguments);

/// `deeptide ps`: this user's live jobs on this machine.
int run_ps(const Arguments& arguments);

/// `deeptide stacks [job]`: what each rank of a live job is doing.
int run_stacks(const Arguments& arguments);

/// `deeptide elastic --config FILE`: the batch and the worlds of the elasticity section.
int run_elastic(const Arguments& arguments);

/// `deeptide doctor`: what this machine, and the hosts of a hostfile, lack.
int run_doctor(const Arguments& arguments);

/// `deeptide bench comm|io`: how fast the ranks' collectives are, or a folder's device.
int run_bench(const Arguments& arguments);
int run_bench_comm(const Arguments& arguments);
int run_bench_io(const Arguments& arguments);

}  // namespace deeptide::launch
