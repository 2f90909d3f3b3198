// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gives the process that owns the ranks a parent that outlives it and kills everything that the ranks have started.
#pragma once

#include <sys/types.h>

#include <functional>

namespace deeptide::launch {

/// Runs `work` in a child process and returns its exit code (128 + signal if it was killed). Kills all remaining
/// descendants when the child has ended for any reason, even those in their own sessions. The child gets SIGTERM if
/// this process is killed.
int run_kept(const std::function<int()>& work);

/// Does as run_kept for a job that the user identifies by this process. Keeps the streams open, and forwards each
/// signal that asks to stop or to pause once. The terminal sends these signals to `work` too, which must accept them
/// only from `keeper`. If this process is killed, `work` gets SIGTERM and finds `keeper` gone. With `own_group`, `work`
/// survives a kill of this process's group, but cannot be in the foreground of a terminal.
int run_kept_job(const std::function<int(pid_t keeper)>& work, bool own_group = false);

/// Kills and reaps every child of this process for which `spared` is false, including orphans adopted meanwhile.
void kill_children(const std::function<bool(int pid)>& spared);

}  // namespace deeptide::launch
