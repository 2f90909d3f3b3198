// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs the `deeptide` command: a job, unless the first word names another command.
#include <string_view>

#include "launch/commands/commands.h"
#include "launch/system/report.h"

namespace deeptide::launch {

namespace {

struct Command {
  std::string_view name;
  int (*run)(const Arguments& arguments);
};

// Users run a script with one of these names as `./name`. --help of parse_options lists the commands for users.
constexpr Command kCommands[] = {
    {"agent", run_agent},       {"bench", run_bench},     {"checkpoint", run_checkpoint},
    {"doctor", run_doctor},     {"elastic", run_elastic}, {"explain", run_explain},
    {"lr-range", run_lr_range}, {"plan", run_plan},       {"ps", run_ps},
    {"rank", run_rank},         {"report", run_report},   {"run", run_job},
    {"ssh", run_ssh},           {"stacks", run_stacks},   {"top", run_top},
    {"trace", run_trace},       {"tune", run_tune},
};

int run(const Arguments& words) {
  for (const Command& command : kCommands) {
    if (!words.empty() && words[0] == command.name) return command.run({words.begin() + 1, words.end()});
  }
  return run_job(words);
}

}  // namespace
}  // namespace deeptide::launch

int main(int argc, char** argv) {
  return deeptide::launch::run_reporting([&] { return deeptide::launch::run({argv + 1, argv + argc}); });
}
