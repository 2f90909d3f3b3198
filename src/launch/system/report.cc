// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps exceptions to exit codes.
#include "launch/system/report.h"

#include <cstdio>
#include <exception>

#include "launch/system/usage_error.h"

namespace deeptide::launch {

int run_reporting(const std::function<int()>& work) {
  try {
    return work();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
    return kExitUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
    return kExitCannotStart;
  }
}

}  // namespace deeptide::launch
