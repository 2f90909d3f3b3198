// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Declares the launcher's command line to CLI11.
#include "launch/plan/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <map>
#include <span>
#include <sstream>
#include <type_traits>
#include <variant>

#include "config/check/suggest.h"
#include "deeptide/discovery.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr int kMaxRanks = 4096;

constexpr const char* kFooter = R"(Examples:
  deeptide --num_gpus 2 train.py --deepspeed_config ds_config.json
  deeptide --num_ranks 4 build/examples/gpt/gpt --steps 100
  deeptide -H hostfile --include worker-2:0@worker-3:0,1 train.py

Commands beside it (each answers --help):
  plan        memory that a model needs, before it is trained
  doctor      what this machine has, and what is wrong with it
  explain     causes and cures of an error message
  top, ps, stacks, trace   a live job: its losses, its ranks, where they wait
  report      pages about finished runs
  checkpoint  lists, shows, checks, compares, imports and exports checkpoints
  tune, lr-range, elastic, bench, ssh)";

// Text that --help-all adds.
constexpr const char* kDetails = R"(

Python scripts (*.py, or --module) run with $VIRTUAL_ENV's or PATH's python3;
anything else is run as a program. Each rank finds RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
`--local_rank=N` is appended for Python scripts that mention this option, and
for all scripts with --local_rank. When a rank fails, the launcher stops the
others and returns the exit code of the first rank that failed (128 + signal
number if it was killed). The first ^C stops the ranks and waits for them; the
second kills them.)";

constexpr const char* kCommon[] = {"--help",      "--help-all", "--version",      "--num_ranks",
                                   "--module",    "--python",   "--as-deepspeed", "--hostfile",
                                   "--include",   "--exclude",  "--num_nodes",    "--launcher",
                                   "--quiet",     "--dry-run",  "--hang_timeout", "--enable_each_rank_log",
                                   "--autotuning"};

constexpr const char* kHosts = "Hosts";
constexpr const char* kRanks = "Ranks";
constexpr const char* kEnding = "Failures and output";

const std::map<std::string, Transport> kTransports = {{"ssh", Transport::ssh},         {"pdsh", Transport::pdsh},
                                                      {"openmpi", Transport::openmpi}, {"mpich", Transport::mpich},
                                                      {"impi", Transport::impi},       {"slurm", Transport::slurm}};

const std::map<std::string, LogLevel> kLogLevels = {{"debug", LogLevel::debug},
                                                    {"info", LogLevel::info},
                                                    {"warning", LogLevel::warning},
                                                    {"error", LogLevel::error},
                                                    {"critical", LogLevel::critical}};

// Looks up a name in a table. The error lists the table's names.
template <typename Value>
Value one_of(const std::map<std::string, Value>& table, const std::string& name, const std::string& option) {
  const auto found = table.find(name);
  if (found != table.end()) return found->second;
  std::string names;
  for (const auto& [known, value] : table) names += (names.empty() ? "" : ", ") + known;
  throw UsageError(option + " must be one of " + names + ", got '" + name + "'");
}

Transport to_transport(const std::string& name) {
  if (name == "mvapich")
    throw UsageError("--launcher mvapich is not supported; its mpirun understands --launcher mpich");
  return one_of(kTransports, name, "--launcher");
}

void declare_hosts(CLI::App& app, Options& options) {
  app.add_option("-H,--hostfile", options.hostfile,
                 "File with one line 'NAME slots=N' per host (default: /job/hostfile, if it exists)")
      ->type_name("FILE");
  app.add_option("-i,--include", options.filter.include, "Use only these hosts: HOST or HOST:SLOT,SLOT, joined by '@'")
      ->type_name("SPEC");
  app.add_option("-e,--exclude", options.filter.exclude, "Use all but these hosts; same form as --include")
      ->type_name("SPEC");
  app.add_option("--num_nodes", options.filter.num_nodes, "Use only the first N hosts")->type_name("N");
  app.add_option("--master_addr", options.master_addr, "Where the ranks meet (default: the first host's address)")
      ->type_name("ADDR");
  app.add_option("--master_port", options.master_port,
                 "Port where the ranks meet (default: a free one; on several hosts " + std::to_string(kDefaultPort) +
                     " or the next free one)")
      ->type_name("PORT");
  app.add_option_function<std::string>(
         "--launcher", [&options](const std::string& name) { options.transport = to_transport(name); },
         "How hosts are reached: ssh (default), pdsh, openmpi, mpich, impi, slurm")
      ->type_name("NAME");
  app.add_option("--launcher_args", options.launcher_args,
                 "Extra arguments for the --launcher program, quoted as one word")
      ->type_name("ARGS");
  app.add_option("--ssh_port", options.ssh_port, "Port of ssh on the hosts")->type_name("PORT");
  app.add_flag("--no_ssh", options.no_ssh, "Start only this host's ranks; requires --node_rank and --master_addr");
  app.add_option("--node_rank", options.node_rank, "With --no_ssh: this host's index in the hostfile, from 0")
      ->type_name("N");
  app.add_flag("--no_ssh_check", options.no_ssh_check, "Accepted for compatibility with DeepSpeed; has no effect");
  app.add_flag("--force_multi", options.force_multi, "Use --launcher even for a single host");
  app.add_option("--venv_script", options.venv_script, "Script that each host's shell sources first")
      ->type_name("FILE");
  app.add_flag("--elastic_training", options.elastic,
               "Restart on the remaining hosts when a rank fails or a host is lost");
  app.add_option("--min_elastic_nodes", options.min_elastic_nodes, "Minimum number of hosts to continue with")
      ->type_name("N");
  app.add_option("--max_elastic_nodes", options.max_elastic_nodes, "Maximum number of hosts to use")->type_name("N");
  app.add_option("--max_restarts", options.max_restarts, "Maximum number of restarts of an elastic job")
      ->type_name("N")
      ->capture_default_str();
  for (CLI::Option* option : app.get_options()) {
    if (option->get_group() == "Options" && option != app.get_help_ptr()) option->group(kHosts);
  }
}

CLI::Option* declare(CLI::App& app, const RankOption& option, RankOptions& options) {
  return std::visit(
      [&](auto member) -> CLI::Option* {
        auto& value = options.*member;
        if constexpr (std::is_same_v<decltype(value), bool&>) {
          return app.add_flag((value ? "!" : "") + std::string(option.flag), value, option.help);
        } else {
          CLI::Option* declared = app.add_option(option.flag, value, option.help)->type_name(option.value);
          if constexpr (std::is_same_v<decltype(value), double&>) declared->capture_default_str();
          return declared;
        }
      },
      option.member);
}

void declare_rank_options(CLI::App& app, Options& options) {
  app.add_option("--num_gpus,--num_ranks,--num_accelerators", options.num_ranks,
                 "Ranks per host (default: one per slot; without a hostfile one per visible GPU, else 1)")
      ->type_name("N")
      ->group(kRanks);
  for (const RankOption& option : rank_options()) {
    declare(app, option, options)->group(option.group == RankOption::Group::ranks ? kRanks : kEnding);
  }
  app.get_option("--no_local_rank")->excludes(app.get_option("--local_rank"));
}

void declare_ending(CLI::App& app, Options& options) {
  std::vector<CLI::Option*> declared;
  declared.push_back(app.add_flag("--save_pid", options.save_pid,
                                  "Write the launcher's process id to PID.deepspeed in the temporary folder"));
  declared.push_back(
      app.add_option_function<std::string>(
             "--log_level",
             [&options](const std::string& name) { options.log_level = one_of(kLogLevels, name, "--log_level"); },
             "Lowest level of messages to print: debug, info (default), warning, error, critical")
          ->type_name("LEVEL"));
  declared.push_back(
      app.add_flag("-q,--quiet", options.quiet, "Print only warnings, failures, and rank 0's lines without a prefix"));
  declared.push_back(
      app.add_flag("--dry-run", options.dry_run, "Print the command and environment per host and rank; start nothing"));
  for (CLI::Option* option : declared) option->group(kEnding);
  app.add_option("--autotuning", options.autotuning,
                 "Search for the fastest configuration, as 'deeptide tune' does; run: then train with it")
      ->check(CLI::IsMember({"tune", "run"}))
      ->type_name("tune|run");
}

/// Leaves only the common options on the page of --help.
void hide_others(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const auto is_name = [option](const char* name) { return option->check_name(name); };
    if (std::none_of(std::begin(kCommon), std::end(kCommon), is_name)) option->group("");
  }
}

void declare(CLI::App& app, Options& options) {
  app.prefix_command();
  set_usage(app, "deeptide [OPTIONS] script [arguments of the script...]");
  declare_rank_options(app, options);
  declare_hosts(app, options);
  declare_ending(app, options);
  app.set_version_flag("--version", "deeptide " DEEPTIDE_VERSION, "Print the version");
  app.get_help_ptr()->description("Print this page");
  app.set_help_all_flag("--help-all", "Print all options");
  app.footer(kFooter);
}

std::string nearest_option(const std::string& name, const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& word : option->get_lnames()) names.push_back("--" + word);
  }
  return config::nearest(name, names);
}

[[noreturn]] void refuse_unknown(const std::string& argument, const CLI::App& app) {
  const std::string name = argument.substr(0, argument.find('='));
  if (name == "--world_info") {
    throw UsageError(
        "option '--world_info' belongs to DeepSpeed's inner launcher; give the hosts with -H and --include");
  }
  const std::string meant = nearest_option(name, app);
  throw UsageError("unknown option '" + name + "'; " +
                   (meant.empty() ? "'deeptide --help-all' lists the known ones; those of the script follow its name"
                                  : "did you mean '" + meant + "'?"));
}

/// Returns a launcher's option among the script's arguments that the script does not mention, or an empty string: the
/// user most likely meant it for the launcher.
std::string misplaced_option(const Options& options, const CLI::App& app) {
  std::ostringstream script;
  script << std::ifstream(options.command[0], std::ios::binary).rdbuf();
  const std::string text = script.str();
  if (options.module || text.empty()) return "";
  for (const std::string& word : std::span(options.command).subspan(1)) {
    if (word == "--") return "";
    const std::string name = word.substr(0, word.find('='));
    if (name.size() < 3 || name.compare(0, 2, "--") != 0 || name == "--help" || name == "--version") continue;
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option != nullptr && text.find(name.substr(2)) == std::string::npos) return name;
  }
  return "";
}

void check_range(const std::string& option, int value, int low, int high) {
  if (value >= low && value <= high) return;
  throw UsageError(option + " must be between " + std::to_string(low) + " and " + std::to_string(high) + ", got " +
                   std::to_string(value));
}

void check_seconds(const std::string& option, double value, double low) {
  if (value >= low && value <= 86400.0) return;
  throw UsageError(option + " must be between " + std::to_string(static_cast<int>(low)) + " and 86400 seconds");
}

void check_single_host(const Options& options) {
  if (!options.no_ssh) {
    if (options.node_rank >= 0) throw UsageError("--node_rank requires --no_ssh, which starts each host separately");
    return;
  }
  if (options.node_rank < 0 || options.master_addr.empty()) {
    throw UsageError("--no_ssh starts only this host's ranks: it requires --node_rank and --master_addr");
  }
  if (options.elastic) throw UsageError("--elastic_training needs a launcher that reaches all hosts; omit --no_ssh");
}

void check_elastic(const Options& options) {
  const bool given = options.min_elastic_nodes != -1 || options.max_elastic_nodes != -1;
  if (given && !options.elastic) {
    throw UsageError("--min_elastic_nodes and --max_elastic_nodes require --elastic_training");
  }
  if (options.min_elastic_nodes != -1) check_range("--min_elastic_nodes", options.min_elastic_nodes, 1, 65536);
  if (options.max_elastic_nodes != -1) {
    check_range("--max_elastic_nodes", options.max_elastic_nodes, std::max(1, options.min_elastic_nodes), 65536);
  }
  check_range("--max_restarts", options.max_restarts, 0, 1'000'000);
  const Transport transport = options.transport.value_or(Transport::ssh);
  if (options.elastic && transport != Transport::ssh && transport != Transport::pdsh) {
    throw UsageError("--elastic_training needs agents: use --launcher ssh or pdsh");
  }
}

void check(const Options& options, const CLI::App& app) {
  if (app.count("--num_ranks") > 0) check_range("--num_ranks", options.num_ranks, 1, kMaxRanks);
  if (app.count("--num_nodes") > 0) check_range("--num_nodes", options.filter.num_nodes, 1, 65536);
  if (options.master_port < 0 || options.master_port > 65535)
    check_range("--master_port", options.master_port, 1, 65535);
  if (app.count("--ssh_port") > 0) check_range("--ssh_port", options.ssh_port, 1, 65535);
  check_seconds("--grace", options.stop_grace_s(), 0.0);
  check_seconds("--hang_timeout", options.hang_timeout_s, 0.0);
  check_seconds("--heartbeat_timeout", options.heartbeat_timeout_s, 1.0);
  if (options.module && options.no_python) {
    throw UsageError("--module runs a Python module and --no_python runs no Python: give one of them");
  }
  if (!options.bind_core_list.empty()) {
    if (!options.bind_cores) throw UsageError("--bind_core_list requires --bind_cores_to_rank");
    parse_number_list(options.bind_core_list, "--bind_core_list");
  }
  check_single_host(options);
  check_elastic(options);
  if (options.command.empty()) {
    throw UsageError(
        "no script given\n  usage: deeptide [options] script [arguments of the script...]\n"
        "  for example: deeptide --num_ranks 2 train.py\n  'deeptide --help' lists options and other commands");
  }
}

}  // namespace

std::optional<Options> parse_options(std::vector<std::string> arguments) {
  Options options;
  CLI::App app{"Starts and supervises one process per rank on each host.", "deeptide"};
  declare(app, options);
  const auto asks = [&](const char* word) {
    return std::find(arguments.begin(), arguments.end(), word) != arguments.end();
  };
  if (asks("--help-all")) {
    app.footer(std::string(kFooter) + kDetails);
  } else if (asks("--help") || asks("-h")) {
    hide_others(app);  // only then: errors about a hidden option do not name it
  }
  if (parse_arguments(app, std::move(arguments))) return std::nullopt;
  options.command = app.remaining();
  if (!options.command.empty() && options.command[0].size() > 1 && options.command[0][0] == '-') {
    refuse_unknown(options.command[0], app);
  }
  options.filter.num_slots = options.num_ranks > 0 ? options.num_ranks : -1;
  if (options.quiet) options.log_level = std::max(options.log_level, LogLevel::error);
  options.quiet = options.log_level >= LogLevel::error;
  check(options, app);
  options.misplaced = misplaced_option(options, app);
  return options;
}

}  // namespace deeptide::launch
