// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The launcher's command line, through CLI11.
#include "launch/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <string_view>

namespace deeptide::launch {
namespace {

constexpr int kMaxRanks = 4096;

constexpr const char* kFooter = R"(
Python scripts (*.py, or --module) run with $VIRTUAL_ENV's or PATH's python3; anything else is run as a program.
Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
so `--local_rank=N` is appended to the script's arguments only if asked for with --local_rank.
The first rank that fails ends the others; its exit code is passed on (128 + signal number if it was killed).
^C once stops the ranks and waits for them; twice kills them.

  deeptide --num_gpus 2 train.py --deepspeed_config ds_config.json
  deeptide --num_ranks 4 build/examples/gpt/gpt --steps 100)";

// Known to users of DeepSpeed's launcher, not here yet: a clearer answer than 'unknown option'.
constexpr std::array<std::string_view, 24> kSeveralHosts = {"-H",
                                                            "--hostfile",
                                                            "-i",
                                                            "--include",
                                                            "-e",
                                                            "--exclude",
                                                            "--num_nodes",
                                                            "--node_rank",
                                                            "--no_ssh",
                                                            "--no_ssh_check",
                                                            "--ssh_port",
                                                            "--master_addr",
                                                            "--launcher",
                                                            "--launcher_args",
                                                            "--force_multi",
                                                            "--save_pid",
                                                            "--venv_script",
                                                            "--log_level",
                                                            "--autotuning",
                                                            "--bind_core_list",
                                                            "--world_info",
                                                            "--elastic_training",
                                                            "--min_elastic_nodes",
                                                            "--max_elastic_nodes"};

// CLI11 knows nothing of what follows the options.
class UsageLine : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: deeptide [OPTIONS] script [arguments of the script...]\n";
  }
};

void declare(CLI::App& app, Options& options) {
  app.prefix_command();
  app.formatter(std::make_shared<UsageLine>());
  app.set_version_flag("--version", "deeptide " DEEPTIDE_VERSION);
  app.add_option("--num_gpus,--num_ranks,--num_accelerators", options.num_ranks,
                 "Ranks to start (default: one per visible GPU, else 1)")
      ->type_name("N");
  app.add_option("--master_port", options.master_port, "Port where the ranks meet (default: a free one)")
      ->type_name("PORT");
  app.add_flag("--module", options.module, "Run the script as a Python module (python3 -m)");
  app.add_flag("--no_python", options.no_python, "Run the script itself, even if it is named *.py");
  app.add_option("--python", options.python, "The Python interpreter to use")->type_name("PATH");
  auto* local_rank =
      app.add_flag("--local_rank", options.pass_local_rank, "Append --local_rank=N to the script's arguments");
  app.add_flag("--no_local_rank", options.no_local_rank,
               "Do not append --local_rank=N (the default; accepted for DeepSpeed's users)")
      ->excludes(local_rank);
  app.add_option("--enable_each_rank_log", options.log_dir, "Write each rank's output to a file in DIR instead")
      ->type_name("DIR");
  app.add_flag("--bind_cores_to_rank", options.bind_cores, "Give each rank its own share of the processor's cores");
  app.add_option("--grace", options.grace_s, "Seconds between asking a rank to stop and killing it")
      ->type_name("SECONDS")
      ->capture_default_str();
  app.add_flag("-q,--quiet", options.quiet, "Print only failures");
  app.add_flag("--dry-run", options.dry_run, "Print each rank's command and environment, start nothing");
  app.footer(kFooter);
}

[[noreturn]] void refuse_unknown(const std::string& argument) {
  const std::string name = argument.substr(0, argument.find('='));
  if (std::find(kSeveralHosts.begin(), kSeveralHosts.end(), name) != kSeveralHosts.end()) {
    throw UsageError("option '" + name + "' is not supported yet: this launcher starts ranks on one machine only");
  }
  throw UsageError("unknown option '" + name +
                   "'; options of the launcher come before the script, 'deeptide --help' lists them");
}

void check(const Options& options, bool num_ranks_given) {
  if (num_ranks_given && (options.num_ranks < 1 || options.num_ranks > kMaxRanks)) {
    throw UsageError("--num_ranks must be between 1 and " + std::to_string(kMaxRanks) + ", got " +
                     std::to_string(options.num_ranks));
  }
  if (options.master_port < 0 || options.master_port > 65535) {
    throw UsageError("--master_port must be between 1 and 65535, got " + std::to_string(options.master_port));
  }
  if (!(options.grace_s >= 0.0 && options.grace_s <= 86400.0)) {
    throw UsageError("--grace must be between 0 and 86400 seconds");
  }
  if (options.module && options.no_python) {
    throw UsageError("--module runs a Python module and --no_python runs no Python: give one of them");
  }
  if (options.command.empty()) throw UsageError("no script given; usage: deeptide [options] script args...");
}

}  // namespace

std::optional<Options> parse_options(std::vector<std::string> arguments) {
  Options options;
  CLI::App app{"Starts one process per rank on this machine and keeps watch over them.", "deeptide"};
  declare(app, options);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::Success& answered) {
    app.exit(answered, std::cout, std::cerr);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  options.command = app.remaining();
  if (!options.command.empty() && options.command[0].size() > 1 && options.command[0][0] == '-') {
    refuse_unknown(options.command[0]);
  }
  check(options, app.count("--num_ranks") > 0);
  return options;
}

}  // namespace deeptide::launch
