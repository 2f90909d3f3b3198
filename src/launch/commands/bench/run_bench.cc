// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide bench`: dispatches to comm or io.
#include <cstdio>

#include "launch/commands/commands.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {

int run_bench(const Arguments& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  if (what == "comm") return run_bench_comm({arguments.begin() + 1, arguments.end()});
  if (what == "io") return run_bench_io({arguments.begin() + 1, arguments.end()});
  if (what == "--help" || what == "-h") {
    std::puts(
        "Usage: deeptide bench comm [OPTIONS]\n       deeptide bench io --folder PATH [OPTIONS]\n\n"
        "  comm  how fast ranks exchange and sum tensors\n  io    how fast a folder's device writes and reads");
    return 0;
  }
  throw UsageError("deeptide bench: got " + (what.empty() ? "nothing" : "'" + what + "'") + ", expected comm or io");
}

}  // namespace deeptide::launch
