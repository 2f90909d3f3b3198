// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide lr-range`: a job whose script takes a learning-rate range test. Takes its own options, then a job's.
#include <CLI/CLI.hpp>
#include <cmath>

#include "launch/commands/commands.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr const char* kRangeWorker = "deeptide._tuning.lr_range";

constexpr const char* kRangeFooter = R"(
The script runs as it is, but the learning rate of its first engine grows with every step, in all groups, whatever its
configuration and its schedule say, and the script ends at the test's last step. Losses are those of
engine.backward(loss). What the script saves on the way it saves: give it a folder of its own.
Accepts all job options as well, after its own (deeptide --help): --num_ranks, -H, --include, --module, ...

  deeptide lr-range --steps 200 --num_ranks 2 train.py --deepspeed_config ds_config.json)";

struct RangeOptions {
  std::string min_lr = "1e-6", max_lr = "1";  // as text: the ranks read the same numbers
  int steps = 100;
  bool linear = false;
  std::string out = "runs/lr-range";
};

void declare(CLI::App& app, RangeOptions& range) {
  set_usage(app, "deeptide lr-range [OPTIONS] [job options] script [arguments...]");
  app.footer(kRangeFooter);
  app.prefix_command();
  const auto rate = CLI::PositiveNumber;
  app.add_option("--min-lr", range.min_lr, "Learning rate of the first step")->check(rate)->option_text("LR=1e-6");
  app.add_option("--max-lr", range.max_lr, "Learning rate of the last step")->check(rate)->option_text("LR=1");
  app.add_option("--steps", range.steps, "Steps of the test")->check(CLI::Range(2, 1'000'000))->option_text("N=100");
  app.add_flag("--linear", range.linear, "Add an equal amount in each step, instead of multiplying by an equal factor");
  app.add_option("--out", range.out, "Folder for lr_range.jsonl and lr_range.png")->option_text("PATH=runs/lr-range");
}

Arguments worker_words(const RangeOptions& range, const Options& job) {
  Arguments words{
      kRangeWorker, "--min-lr", range.min_lr, "--max-lr", range.max_lr, "--steps", std::to_string(range.steps),
      "--out",      range.out};
  if (range.linear) words.push_back("--linear");
  if (job.module) words.push_back("--as-module");
  words.insert(words.end(), job.command.begin(), job.command.end());
  return words;
}

}  // namespace

int run_lr_range(const Arguments& arguments) {
  CLI::App app("Finds a learning rate: trains with a growing one, and shows the loss against it.", "deeptide lr-range");
  RangeOptions range;
  declare(app, range);
  if (const auto code = parse_arguments(app, arguments)) return *code;
  if (std::stod(range.min_lr) >= std::stod(range.max_lr)) {
    throw UsageError("--min-lr " + range.min_lr + " is not below --max-lr " + range.max_lr);
  }
  std::optional<Options> options = parse_options(app.remaining());
  if (!options) return 0;
  if (!runs_python(*options)) {
    throw UsageError("deeptide lr-range needs a Python script (*.py, or --module), got '" + options->command[0] + "'");
  }
  options->command = worker_words(range, *options);
  options->module = true;
  return run_job(std::move(*options));
}

}  // namespace deeptide::launch
