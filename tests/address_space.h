// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A process whose address space is nearly used up.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace deeptide {

/// Lets this process map so many bytes more than it has.
inline void limit_addresses(int64_t more) {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit space{};
  ::getrlimit(RLIMIT_AS, &space);
  space.rlim_cur = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + more);
  ::setrlimit(RLIMIT_AS, &space);
}

}  // namespace deeptide
