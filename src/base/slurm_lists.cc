// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads as much of SLURM's lists as callers need.
#include "base/slurm_lists.h"

#include <algorithm>
#include <cstdlib>

#include "deeptide/errors.h"

namespace deeptide {

std::string first_of_node_list(const std::string& list) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ',';) {
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const size_t close = list.find(']', at);
    const size_t end = list.find_first_of(",-]", at);
    if (close == std::string::npos || end == at + 1) {
      throw ConfigError("a SLURM node list, got " + list + ": expected a form such as node[01-04,07]");
    }
    host += list.substr(at + 1, end - at - 1);
    at = close + 1;
  }
  return host;
}

int tasks_of_node(const std::string& counts, int index) {
  for (size_t at = 0; at < counts.size();) {
    const size_t comma = std::min(counts.find(',', at), counts.size());
    const std::string part = counts.substr(at, comma - at);
    const size_t times = part.find("(x");
    const int repeats = times == std::string::npos ? 1 : std::atoi(part.c_str() + times + 2);
    if (index < repeats) return std::atoi(part.c_str());
    index -= repeats;
    at = comma + 1;
  }
  return 0;
}

}  // namespace deeptide
