// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A parent for the process that owns the ranks, which outlives it, so that nothing the ranks ever started can.
#pragma once

#include <sys/types.h>

#include <functional>

namespace deeptide::launch {

/// Runs `work` in a child process and returns its exit code (128 + signal if it was killed). When it has ended, however
/// that came about, every descendant that is left is killed, even those that went into sessions of their own. When this
/// process is killed instead, the child gets SIGTERM.
int run_kept(const std::function<int()>& work);

/// The same for a job that the user knows by this process: its streams stay open, and each signal that asks it to stop
/// or to pause is passed on once. The terminal sends those to `work` too, which must take them from `keeper` alone.
/// When this process is killed, `work` gets SIGTERM and finds `keeper` gone. With `own_group` it survives whoever kills
/// this process's group, but cannot be in the foreground of a terminal.
int run_kept_job(const std::function<int(pid_t keeper)>& work, bool own_group = false);

/// Kills and reaps every child of this process but `spared`, also those that come to it meanwhile as orphans.
void kill_children(const std::function<bool(int pid)>& spared);

}  // namespace deeptide::launch
