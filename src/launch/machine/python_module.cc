// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Executes Python in place of this program.
#include "launch/machine/python_module.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "launch/machine/machine.h"

namespace deeptide::launch {

void become_module(const std::string& module, const std::vector<std::string>& arguments, const std::string& python) {
  std::vector<std::string> words{python.empty() ? find_python() : python, "-m", module};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(pointers.front(), pointers.data());
  throw std::runtime_error("cannot run " + words.front() + ": " + std::strerror(errno));
}

}  // namespace deeptide::launch
