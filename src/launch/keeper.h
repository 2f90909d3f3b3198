// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A parent for what supervises ranks that outlives it, so that nothing the ranks ever started can.
#pragma once

#include <functional>

namespace deeptide::launch {

/// Runs `work` in a child process and returns its exit code (128 + signal if it was killed). When it has ended, however
/// that came about, every descendant that is left is killed, even those that went into sessions of their own. When this
/// process is killed instead, the child gets SIGTERM. Signals that ask to stop are the child's matter: it hears of them
/// itself, as a member of the same group. With `pass_on` it has a group of its own, and gets those that come here.
int run_kept(const std::function<int()>& work, bool pass_on = false);

/// Kills and reaps every child of this process but `spared`, also those that come to it meanwhile as orphans.
void kill_children(const std::function<bool(int pid)>& spared);

}  // namespace deeptide::launch
