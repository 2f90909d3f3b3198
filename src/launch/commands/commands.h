// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Declares one function per command of `deeptide NAME …`; main.cc has the table.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

struct Options;

/// The words after the command's name. Each function answers its own --help.
using Arguments = std::vector<std::string>;

/// `deeptide [options] script args…`: runs if the first word names no command.
int run_job(const Arguments& arguments);
/// Does the same for parsed options.
int run_job(Options options);

/// `deeptide agent`: runs one host's part of a job; started by the launcher.
int run_agent(const Arguments& arguments);

/// `deeptide rank script args…`: runs one rank under mpirun or srun; started by the launcher.
int run_rank(const Arguments& arguments);

/// `deeptide ssh command…`: runs a command on all hosts.
int run_ssh(const Arguments& arguments);

/// `deeptide ps`: lists this user's live jobs on this machine.
int run_ps(const Arguments& arguments);

/// `deeptide stacks [job]`: shows what each rank of a live job is doing.
int run_stacks(const Arguments& arguments);

/// `deeptide elastic --config FILE`: prints the batch and the valid worlds of the elasticity section.
int run_elastic(const Arguments& arguments);

/// `deeptide explain MESSAGE`: prints what the documentation says about an error. Returns only if it cannot.
int run_explain(const Arguments& arguments);

/// `deeptide plan …`: tells what an engine would take of memory and disk. Returns only if it cannot.
int run_plan(const Arguments& arguments);

/// `deeptide report RUN [OTHER]`: writes a page about a recorded run. Likewise.
int run_report(const Arguments& arguments);

/// `deeptide trace [job | FOLDER]`: records steps of a live job; joins the ranks' timelines.
int run_trace(const Arguments& arguments);

/// `deeptide top [job]`: shows a live job, again and again.
int run_top(const Arguments& arguments);

/// `deeptide checkpoint ls|show|verify|diff|export|prune`: works on checkpoints without a job.
int run_checkpoint(const Arguments& arguments);

/// `deeptide doctor`: examines this machine and the hosts of a hostfile.
int run_doctor(const Arguments& arguments);

/// `deeptide lr-range script args…`: a job whose script takes a learning-rate range test.
int run_lr_range(const Arguments& arguments);

/// `deeptide tune script args…`: searches for the fastest configuration of a script.
int run_tune(const Arguments& arguments);

/// `deeptide bench comm|io`: measures the speed of collectives, or of a folder's device.
int run_bench(const Arguments& arguments);
int run_bench_comm(const Arguments& arguments);
int run_bench_io(const Arguments& arguments);

}  // namespace deeptide::launch
