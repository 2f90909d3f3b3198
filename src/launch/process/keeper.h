// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A parent for the process that owns the ranks, which outlives it, so that nothing the ranks ever started can.
#pragma once

#include <sys/types.h>

#include <functional>

namespace deeptide::launch {

/// Runs `work` in a child process and returns its exit code (128 + signal if it was killed). When it has ended, for
/// whatever reason, every remaining descendant is killed, even those in sessions of their own. When this
/// process is killed instead, the child gets SIGTERM.
int run_kept(const std::function<int()>& work);

/// The same for a job that the user identifies by this process: its streams stay open, and each signal that asks it to
/// stop or to pause is passed on once. The terminal sends those to `work` too, which must accept them from `keeper`
/// only. When this process is killed, `work` gets SIGTERM and finds `keeper` gone. With `own_group` it survives a kill
/// of this process's group, but cannot be in the foreground of a terminal.
int run_kept_job(const std::function<int(pid_t keeper)>& work, bool own_group = false);

/// Kills and reaps every child of this process except `spared`, including orphans that it adopts meanwhile.
void kill_children(const std::function<bool(int pid)>& spared);

}  // namespace deeptide::launch
