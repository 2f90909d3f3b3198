// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A program to run on this machine.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/exports.h"

namespace deeptide::launch {

struct Command {
  std::vector<std::string> words;   // the first is the path of the executable
  Environment environment = {};     // set on top of the process's own
  std::vector<int> cores = {};      // bound to these; empty: unbound
  std::vector<int> inherited = {};  // descriptors that stay open in it
  bool starts_ranks = false;  // mpirun, srun: asked to end before it is killed, so that it ends its ranks elsewhere
};

/// The command as a line that a shell would run. Values whose names say that they are secret are left out.
std::string to_shell(const Command& command);

}  // namespace deeptide::launch
