// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide ps`: lists the live jobs of this user.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <sstream>

#include "launch/commands/commands.h"
#include "launch/system/command_line.h"
#include "launch/system/terminal.h"
#include "launch/watch/job_socket.h"

namespace deeptide::launch {
namespace {

constexpr int kStateTimeout_s = 5;

std::vector<std::vector<std::string>> cells_of(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream cells(line);
    rows.emplace_back();
    for (std::string cell; std::getline(cells, cell, '\t');) rows.back().push_back(cell);
  }
  return rows;
}

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
  lines = "JOB\tHOSTS\tRANKS\tSTEP\tWAITING\tAGE\tCOMMAND\n" + lines;
  const size_t width = terminal_size().columns;  // 0: for a program, which takes tabs
  std::fputs(width == 0 ? lines.c_str() : aligned(cells_of(lines), width).c_str(), stdout);
  return 0;
}

}  // namespace deeptide::launch
