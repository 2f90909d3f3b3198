// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide top`: shows a live job, again and again.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <thread>

#include "base/libraries/nlohmann.h"
#include "launch/commands/commands.h"
#include "launch/commands/observe/top_page.h"
#include "launch/system/command_line.h"
#include "launch/system/terminal.h"
#include "launch/system/usage_error.h"
#include "launch/watch/job_socket.h"

namespace deeptide::launch {
namespace {

constexpr int kTopTimeout_s = 5;

}  // namespace

int run_top(const Arguments& arguments) {
  CLI::App app("Shows a live job: its loss and rates, what limits its steps, and what each rank does.", "deeptide top");
  std::string id;
  double every_s = 1.0;
  int64_t num_pages = 0;
  bool as_json = false;
  app.add_option("job", id, "The job's id from 'deeptide ps'; optional if only one job is live");
  app.add_option("--every", every_s, "Seconds between two pages")->check(CLI::Range(0.1, 5.0));
  app.add_option("-n,--pages", num_pages, "End after this many pages; 0: with the job")->check(CLI::NonNegativeNumber);
  app.add_flag("--json", as_json, "One line of JSON per page, for programs");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const LiveJob job = find_job(id);
  ask(job, "top", kTopTimeout_s);  // the ranks tell of their steps from now on
  for (int64_t page = 1; num_pages == 0 || page <= num_pages; ++page) {
    std::this_thread::sleep_for(std::chrono::duration<double>(every_s));
    const std::string answer = ask(job, "top", kTopTimeout_s);
    if (answer.empty()) {
      if (page == 1) throw UsageError("job " + job.id + " did not answer: it has ended, or its launcher is stopped");
      std::printf("job %s has ended\n", job.id.c_str());
      return 0;
    }
    const auto [rows, columns] = terminal_size();
    if (as_json) {
      std::printf("%s\n", answer.c_str());
    } else {
      const std::string clear = rows == 0 ? "" : "\x1b[H\x1b[2J";  // also over ssh: two sequences that all know
      std::printf("%s%s", clear.c_str(), top_page(read_json(answer), rows, columns).c_str());
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace deeptide::launch
