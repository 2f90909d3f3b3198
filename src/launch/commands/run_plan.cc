// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide plan`, which needs torch: in the interpreter that a job would use.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "launch/commands/commands.h"
#include "launch/system/machine.h"

namespace deeptide::launch {

int run_plan(const Arguments& arguments) {
  std::vector<std::string> words{find_python(), "-m", "deeptide._plan_command"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(pointers.front(), pointers.data());
  throw std::runtime_error("cannot run " + words.front() + ": " + std::strerror(errno));
}

}  // namespace deeptide::launch
