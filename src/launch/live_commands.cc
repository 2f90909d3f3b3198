// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// `deeptide ps` and `deeptide stacks`: questions to live launchers of this machine.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "launch/command_line.h"
#include "launch/job_socket.h"
#include "launch/options.h"

namespace deeptide::launch {
namespace {

constexpr int kStateTimeout = 5;
constexpr int kStacksTimeout = 120;  // two seconds for each of many ranks

LiveJob chosen(const std::vector<LiveJob>& jobs, const std::string& id) {
  if (id.empty() && jobs.size() == 1) return jobs.front();
  std::string ids;
  for (const LiveJob& job : jobs) {
    if (job.id == id) return job;
    ids += (ids.empty() ? "" : ", ") + job.id;
  }
  if (jobs.empty())
    throw UsageError("no live job of this user was launched on this machine; ask where its launcher runs");
  if (id.empty()) throw UsageError("several jobs are live; name one of: " + ids);
  throw UsageError("no live job " + id + "; there are: " + ids);
}

}  // namespace

int run_ps(const Arguments& arguments) {
  CLI::App app("Lists this user's live jobs on this machine (root: everybody's).", "deeptide ps");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  std::string lines;
  for (const LiveJob& job : live_jobs()) lines += ask(job, "ps", kStateTimeout);
  if (lines.empty()) {
    std::puts("no live jobs");
    return 0;
  }
  std::puts("JOB\tHOSTS\tRANKS\tSTEP\tWAITING\tAGE\tCOMMAND");
  std::fputs(lines.c_str(), stdout);
  return 0;
}

int run_stacks(const Arguments& arguments) {
  CLI::App app("Shows where each rank of a live job is, who waits for whom, and their stacks.", "deeptide stacks");
  std::string id;
  app.add_option("job", id, "The job, as 'deeptide ps' lists it; not needed if there is one");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const LiveJob job = chosen(live_jobs(), id);
  const std::string report = ask(job, "stacks", kStacksTimeout);
  if (report.empty()) throw UsageError("job " + job.id + " gave no answer; it has ended, or its launcher is stopped");
  std::fputs(report.c_str(), stdout);
  return 0;
}

}  // namespace deeptide::launch
