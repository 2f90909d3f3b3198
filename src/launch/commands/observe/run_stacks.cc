// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide stacks`: shows where each rank of a live job is.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "launch/commands/commands.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"
#include "launch/watch/job_socket.h"

namespace deeptide::launch {
namespace {

constexpr int kStacksTimeout_s = 120;  // allows for many ranks at two seconds each

}  // namespace

int run_stacks(const Arguments& arguments) {
  CLI::App app("Shows where each rank of a live job is, what it waits for, and its stacks.", "deeptide stacks");
  std::string id;
  app.add_option("job", id, "The job's id from 'deeptide ps'; optional if only one job is live");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const LiveJob job = find_job(id);
  const std::string report = ask(job, "stacks", kStacksTimeout_s);
  if (report.empty()) throw UsageError("job " + job.id + " did not answer: it has ended, or its launcher is stopped");
  std::fputs(report.c_str(), stdout);
  return 0;
}

}  // namespace deeptide::launch
