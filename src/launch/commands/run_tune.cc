// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide tune`: splits the words into a job's options and its script, and hands them to the search.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "base/libraries/nlohmann.h"
#include "launch/commands/commands.h"
#include "launch/machine/python_module.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr const char* kTuneFooter = R"(
The script runs as it is, many times: its first engine gets other settings from run to run, and the script ends after a
few steps. The first run tells the model's size, from which a plan follows; what does not fit is not run. The
"autotuning" section of the script's configuration sets bounds and folders. A search that was ended goes on where it
was. What the script saves on the way it saves: give it a folder of its own.
Accepts all job options as well, after its own (deeptide --help): --num_ranks, -H, --include, --module, ...

  deeptide tune --num_ranks 2 train.py --deepspeed_config ds_config.json)";

/// The job's options as they were given, without those of tuning.
Arguments job_words(const Arguments& arguments, size_t num_of_command) {
  Arguments words(arguments.begin(), arguments.end() - static_cast<ptrdiff_t>(num_of_command));
  if (!words.empty() && words.back() == "--") words.pop_back();
  const std::string option = "--autotuning";
  for (auto word = words.begin(); word != words.end();) {
    const bool apart = *word == option;
    if (apart || word->starts_with(option + "=")) {
      word = words.erase(word, word + (apart ? 2 : 1));
    } else {
      ++word;
    }
  }
  return words;
}

}  // namespace

int run_tune(const Arguments& arguments) {
  CLI::App app(
      "Searches for the fastest configuration of a script: plans first, then trains for a few steps at a time.",
      "deeptide tune");
  set_usage(app, "deeptide tune [OPTIONS] [job options] script [arguments...]");
  app.footer(kTuneFooter);
  app.prefix_command();
  bool train = false;
  app.add_flag("--run", train, "Train with the fastest configuration afterwards");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const Arguments rest = app.remaining();
  const std::optional<Options> options = parse_options(rest);
  if (!options) return 0;
  if (!runs_python(*options)) {
    throw UsageError("deeptide tune needs a Python script (*.py, or --module), got '" + options->command[0] + "'");
  }
  if (options->dry_run) throw UsageError("deeptide tune runs the script: omit --dry-run");
  const nlohmann::json words = {{"launcher", std::filesystem::read_symlink("/proc/self/exe").string()},
                                {"job", job_words(rest, options->command.size())},
                                {"as_module", options->module},
                                {"command", options->command},
                                {"run", train || options->autotuning == "run"}};
  become_module("deeptide._tuning.command", {write_json(words)}, options->python);
}

}  // namespace deeptide::launch
