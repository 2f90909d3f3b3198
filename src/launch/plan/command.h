// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A program to run on this machine.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/exports.h"

namespace deeptide::launch {

struct Command {
  std::vector<std::string> words;   // the first word is the path of the executable
  Environment environment = {};     // set on top of the process's own
  std::vector<int> cores = {};      // binds the program to them; empty: unbound
  std::vector<int> inherited = {};  // descriptors that stay open in it
  bool starts_ranks = false;  // mpirun, srun: asked to end before it is killed, so that it ends its ranks elsewhere
};

/// Returns the command as a shell line. Omits variables whose names mark them as secret.
std::string to_shell(const Command& command);

}  // namespace deeptide::launch
