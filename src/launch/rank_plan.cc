// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What each rank runs: the script's kind, the rendezvous variables, and a share of the cores.
#include "launch/rank_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "launch/machine.h"

namespace deeptide::launch {
namespace {

namespace fs = std::filesystem;

std::string resolve_program(const std::string& name) {
  std::string path = find_program(name);
  if (path.empty()) {
    const bool here = fs::exists(name);
    throw UsageError("program '" + name + "' was not found in PATH" + (here ? "; did you mean './" + name + "'?" : ""));
  }
  if (!fs::exists(path)) throw UsageError("program '" + path + "' does not exist");
  if (fs::is_directory(path)) throw UsageError("'" + path + "' is a folder, not a program");
  if (access(path.c_str(), X_OK) != 0) {
    throw UsageError("'" + path + "' is neither a .py script nor executable; chmod +x it, or use --module");
  }
  return path;
}

bool is_python_script(const std::string& name) { return fs::path(name).extension() == ".py"; }

// The command of every rank, but for the rank's own argument.
std::vector<std::string> base_command(const Options& options) {
  const std::string& script = options.command[0];
  std::vector<std::string> command;
  if (options.module) {
    command = {options.python.empty() ? find_python() : resolve_program(options.python), "-m", script};
  } else if (!options.no_python && is_python_script(script)) {
    if (!fs::exists(script)) throw UsageError("script '" + script + "' does not exist");
    command = {options.python.empty() ? find_python() : resolve_program(options.python), script};
  } else {
    command = {resolve_program(script)};
  }
  command.insert(command.end(), options.command.begin() + 1, options.command.end());
  return command;
}

int resolve_num_ranks(const Options& options) {
  if (options.num_ranks > 0) return options.num_ranks;
  return std::max(1, count_devices("/dev", std::getenv("CUDA_VISIBLE_DEVICES")));
}

std::vector<int> share_of_cores(const std::vector<int>& cores, int rank, int num_ranks) {
  const size_t each = cores.size() / num_ranks;
  return {cores.begin() + rank * each, cores.begin() + (rank + 1) * each};
}

bool is_plain(const std::string& word) {
  return !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("_-./=:,+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
}

std::string shell_quote(const std::string& word) {
  if (is_plain(word)) return word;
  std::string quoted = "'";
  for (char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

std::vector<RankPlan> plan_ranks(const Options& options) {
  const int num_ranks = resolve_num_ranks(options);
  const std::vector<std::string> command = base_command(options);
  const std::vector<int> cores = usable_cores();
  if (options.bind_cores && static_cast<int>(cores.size()) < num_ranks) {
    throw UsageError("--bind_cores_to_rank needs a core for each rank: " + std::to_string(num_ranks) + " ranks, " +
                     std::to_string(cores.size()) + " cores");
  }
  const std::string size = std::to_string(num_ranks);
  std::map<std::string, std::string> shared = {
      {"WORLD_SIZE", size},       {"LOCAL_WORLD_SIZE", size},
      {"LOCAL_SIZE", size},       {"MASTER_ADDR", "127.0.0.1"},
      {"CROSS_RANK", "0"},        {"CROSS_SIZE", "1"},
      {"DEEPTIDE_LAUNCHER", "1"}, {"MASTER_PORT", std::to_string(choose_port(options.master_port))},
  };
  if (!std::getenv("OMP_NUM_THREADS")) {
    shared["OMP_NUM_THREADS"] = std::to_string(std::max<size_t>(1, cores.size() / num_ranks));
  }
  if (!std::getenv("PYTHONUNBUFFERED")) shared["PYTHONUNBUFFERED"] = "1";

  std::vector<RankPlan> plans;
  for (int rank = 0; rank < num_ranks; ++rank) {
    RankPlan plan{rank, command, shared, {}};
    plan.environment["RANK"] = plan.environment["LOCAL_RANK"] = std::to_string(rank);
    if (options.pass_local_rank) plan.command.push_back("--local_rank=" + std::to_string(rank));
    if (options.bind_cores) plan.cores = share_of_cores(cores, rank, num_ranks);
    plans.push_back(std::move(plan));
  }
  return plans;
}

std::string to_shell(const RankPlan& plan) {
  std::string line;
  for (const auto& [name, value] : plan.environment) line += name + "=" + shell_quote(value) + " ";
  for (const std::string& word : plan.command) line += shell_quote(word) + " ";
  line.pop_back();
  return line;
}

}  // namespace deeptide::launch
