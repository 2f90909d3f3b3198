// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Plans the command, the rendezvous variables and the share of the cores of each rank.
#include "launch/plan/rank_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/machine/machine.h"
#include "launch/machine/own_interface.h"
#include "launch/system/shell.h"
#include "launch/system/usage_error.h"

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

std::string interpreter(const RankOptions& options, bool here) {
  if (options.python.empty()) return here ? find_python() : "python3";
  return here ? resolve_program(options.python) : options.python;
}

// Returns the command of every rank, without the rank's own argument.
std::vector<std::string> base_command(const RankOptions& options, bool here) {
  const std::string& script = options.command[0];
  std::vector<std::string> command;
  if (runs_python(options)) {
    command = {interpreter(options, here)};
    // Becomes the same interpreter with the interface's folder on its path.
    if (options.as_deepspeed) command.insert(command.end(), {"-m", "deeptide.as_deepspeed"});
    if (options.module) command.push_back("-m");
    if (!options.module && here && !fs::exists(script)) throw UsageError("script '" + script + "' does not exist");
    command.push_back(script);
  } else {
    command = {here ? resolve_program(script) : script};
  }
  command.insert(command.end(), options.command.begin() + 1, options.command.end());
  return command;
}

// DeepSpeed's launcher always appends --local_rank=N, torchrun never does. Scripts that mention it expect it.
bool wants_local_rank(const RankOptions& options) {
  if (options.pass_local_rank || options.no_local_rank) return options.pass_local_rank;
  if (options.module || !runs_python(options)) return false;
  std::ostringstream text;
  text << std::ifstream(options.command[0]).rdbuf();
  return text.str().find("--local_rank") != std::string::npos;
}

std::vector<int> share_of_cores(const std::vector<int>& cores, int rank, int num_ranks) {
  const size_t each = cores.size() / num_ranks;
  return {cores.begin() + rank * each, cores.begin() + (rank + 1) * each};
}

// ROCm's torch reads CUDA's name too; use HIP's own name where the driver is AMD's.
const char* visible_devices_name() {
  return fs::exists("/dev/kfd") && !fs::exists("/dev/nvidiactl") ? "HIP_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES";
}

/// Whether all devices of this host are hidden from the job, by an empty list: it runs on CPUs, and slots are ranks.
bool hides_devices() {
  const char* const visible = std::getenv(visible_devices_name());
  return visible != nullptr && *visible == '\0';
}

void check_devices(const HostPlace& place) {
  const int present = hides_devices() ? 0 : count_devices("/dev", nullptr);
  if (present == 0 || place.devices.empty() || place.devices.back() < present) return;
  throw UsageError("slot " + std::to_string(place.devices.back()) + " is used, but there are " +
                   std::to_string(present) + " GPUs; correct slots=N in the hostfile");
}

Environment shared_environment(const RankOptions& options, const HostPlace& place, size_t num_cores, bool here) {
  Environment shared = place.environment;
  const std::string size = std::to_string(place.num_ranks);
  shared["WORLD_SIZE"] = std::to_string(place.world_size);
  shared["LOCAL_WORLD_SIZE"] = shared["LOCAL_SIZE"] = size;
  shared["CROSS_RANK"] = std::to_string(place.node_rank);
  shared["CROSS_SIZE"] = std::to_string(place.num_nodes);
  shared["MASTER_ADDR"] = place.master_addr;
  shared["MASTER_PORT"] = std::to_string(place.master_port);
  shared["DEEPTIDE_LAUNCHER"] = "1";
  if (options.as_deepspeed) shared["DEEPTIDE_AS_DEEPSPEED"] = "1";
  if (!place.devices.empty() && !(here && hides_devices()))
    shared[visible_devices_name()] = join_numbers(place.devices);
  const auto set_default = [&](const char* name, const std::string& value) {
    if (!std::getenv(name) && !shared.count(name)) shared[name] = value;
  };
  if (here) set_default("OMP_NUM_THREADS", std::to_string(std::max<size_t>(1, num_cores / place.num_ranks)));
  set_default("PYTHONUNBUFFERED", "1");
  // Streams share so many of a GPU's queues. On 8, the default, a collective could stand behind one of another channel
  // that waits for this rank's work.
  set_default("CUDA_DEVICE_MAX_CONNECTIONS", "32");
  // Gloo announces the address of the machine's name to its peers, and many systems map that name to loopback.
  if (here && place.num_nodes > 1 && own_name_is_local()) {
    const std::string interface = interface_towards(place.master_addr);
    if (!interface.empty()) set_default("GLOO_SOCKET_IFNAME", interface);
  }
  return shared;
}

std::vector<int> cores_to_share(const RankOptions& options, int num_ranks) {
  std::vector<int> cores = usable_cores();
  if (!options.bind_core_list.empty()) {
    const std::vector<int> listed = parse_number_list(options.bind_core_list, "--bind_core_list");
    for (int core : listed) {
      if (std::find(cores.begin(), cores.end(), core) != cores.end()) continue;
      throw UsageError("--bind_core_list: core " + std::to_string(core) +
                       " is not available here; available cores: " + join_numbers(cores));
    }
    cores = listed;
  }
  if (options.bind_cores && static_cast<int>(cores.size()) < num_ranks) {
    throw UsageError("--bind_cores_to_rank needs at least one core per rank: " + std::to_string(num_ranks) +
                     " ranks, " + std::to_string(cores.size()) + " cores");
  }
  return cores;
}

}  // namespace

std::vector<RankPlan> plan_ranks(const RankOptions& options, const HostPlace& place, bool here) {
  const std::vector<std::string> words = base_command(options, here);
  const bool local_rank = wants_local_rank(options);
  const std::vector<int> cores = here ? cores_to_share(options, place.num_ranks) : std::vector<int>{};
  if (here) check_devices(place);
  const Environment shared = shared_environment(options, place, cores.size(), here);
  std::vector<RankPlan> plans;
  for (int local = 0; local < place.num_ranks; ++local) {
    RankPlan plan{.rank = place.first_rank + local, .command = {.words = words, .environment = shared}};
    Command& command = plan.command;
    command.environment["RANK"] = std::to_string(plan.rank);
    command.environment["LOCAL_RANK"] = std::to_string(local);
    if (local_rank) command.words.push_back("--local_rank=" + std::to_string(local));
    if (here && options.bind_cores) command.cores = share_of_cores(cores, local, place.num_ranks);
    plans.push_back(std::move(plan));
  }
  return plans;
}

int resolve_num_ranks(const Options& options) {
  if (options.num_ranks > 0) return options.num_ranks;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return std::max(1, count_devices("/dev", visible ? visible : std::getenv("HIP_VISIBLE_DEVICES")));
}

bool runs_python(const RankOptions& options) {
  return options.module || (!options.no_python && is_python_script(options.command[0]));
}

std::string to_shell(const Command& command) {
  std::string line;
  for (const auto& [name, value] : command.environment) {
    if (!is_secret(name)) line += name + "=" + shell_quote(value) + " ";
  }
  return line + shell_join(command.words);
}

}  // namespace deeptide::launch
