// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a job from its command line to its exit code: on this machine, over agents, or through a starter.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "launch/commands/commands.h"
#include "launch/job/coordinator.h"
#include "launch/job/dry_run.h"
#include "launch/job/starter.h"
#include "launch/job/supervisor.h"
#include "launch/machine/machine.h"
#include "launch/plan/job_hosts.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/process/keeper.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

namespace fs = std::filesystem;

/// The file of --save_pid, which the destructor removes.
class PidFile {
 public:
  PidFile() : path_(fs::temp_directory_path() / (std::to_string(getpid()) + ".deepspeed")) {
    std::ofstream stream(path_);
    stream << getpid();
    if (!stream.flush()) throw UsageError("--save_pid: cannot write " + path_.string());
  }
  ~PidFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  PidFile(const PidFile&) = delete;
  PidFile& operator=(const PidFile&) = delete;

 private:
  fs::path path_;
};

std::string started_text(const std::vector<RankPlan>& plans) {
  return std::to_string(plans.size()) + (plans.size() == 1 ? " rank" : " ranks") +
         " on this machine, meeting at port " + plans.front().command.environment.at("MASTER_PORT");
}

int run_here(const Options& options, const JobHosts& job) {
  const std::vector<RankPlan> plans = plan_ranks(options, job.place);
  if (!options.dry_run) {
    return run_kept_job([&](pid_t keeper) { return Supervisor(options, keeper).run(plans, started_text(plans)); });
  }
  for (const RankPlan& plan : plans) std::puts(to_shell(plan.command).c_str());
  return 0;
}

}  // namespace

int run_job(const Arguments& arguments) {
  std::optional<Options> options = parse_options(arguments);
  if (!options) return 0;
  return options->autotuning.empty() ? run_job(std::move(*options)) : run_tune(arguments);
}

int run_job(Options options) {
  if (!options.misplaced.empty()) {
    std::fprintf(
        stderr,
        "[deeptide] warning: %s stands after the script, so the script gets it, which does not mention it; options "
        "of deeptide come before the script: deeptide %s … %s\n",
        options.misplaced.c_str(), options.misplaced.c_str(), options.command[0].c_str());
  }
  if (options.quiet) ::setenv("DEEPTIDE_LOG_LEVEL", "warning", /*overwrite=*/0);  // of the ranks
  const JobHosts job = find_hosts(options);
  for (const std::string& warning : job.warnings) {
    if (!options.quiet) std::fprintf(stderr, "[deeptide] %s\n", warning.c_str());
  }
  if (options.python.empty() && runs_python(options) && options.venv_script.empty()) options.python = find_python();
  if (options.python.empty() && !options.venv_script.empty()) options.python = "python3";
  std::optional<PidFile> pid_file;
  if (options.save_pid && !options.dry_run) pid_file.emplace();
  switch (job.way) {
    case JobHosts::Way::here:
      return run_here(options, job);
    case JobHosts::Way::agents:
      if (options.dry_run) return print_agents(options, job.hosts);
      return run_over_agents(options, job.hosts);
    default:
      if (options.dry_run) return print_starter(options, job.hosts);
      return run_starter(options, job.hosts);
  }
}

}  // namespace deeptide::launch
