// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide ps`: lists the live jobs of this user.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "launch/commands/commands.h"
#include "launch/system/command_line.h"
#include "launch/watch/job_socket.h"

namespace deeptide::launch {
namespace {

constexpr int kStateTimeout_s = 5;

}  // namespace

int run_ps(const Arguments& arguments) {
  CLI::App app("Lists this user's live jobs on this machine (root: those of all users).", "deeptide ps");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  std::string lines;
  for (const LiveJob& job : live_jobs()) lines += ask(job, "ps", kStateTimeout_s);
  if (lines.empty()) {
    std::puts("no live jobs");
    return 0;
  }
  std::puts("JOB\tHOSTS\tRANKS\tSTEP\tWAITING\tAGE\tCOMMAND");
  std::fputs(lines.c_str(), stdout);
  return 0;
}

}  // namespace deeptide::launch
