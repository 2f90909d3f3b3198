// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Applies the limits of the command line, then those of the configuration.
#include "launch/plan/elastic_hosts.h"

#include <algorithm>
#include <filesystem>

#include "config/elasticity.h"

namespace deeptide::launch {

std::string config_argument(const std::vector<std::string>& command) {
  for (size_t i = 1; i < command.size(); ++i) {
    for (const std::string name : {"--deepspeed_config", "--deepspeed", "--config"}) {
      std::string value;
      if (command[i] == name && i + 1 < command.size()) value = command[i + 1];
      if (command[i].starts_with(name + "=")) value = command[i].substr(name.size() + 1);
      if (value.ends_with(".json")) return value;  // --deepspeed may also stand alone
    }
  }
  return {};
}

std::vector<Host> elastic_hosts(const Options& options, std::vector<Host> reached) {
  if (options.max_elastic_nodes > 0 && static_cast<int>(reached.size()) > options.max_elastic_nodes) {
    reached.resize(options.max_elastic_nodes);
  }
  const std::string path = config_argument(options.command);
  if (path.empty() || !std::filesystem::exists(path)) return reached;
  const Config config = Config::from_file(path);
  if (!config.elasticity().enabled) return reached;
  const int slots = num_slots(reached);
  const auto worlds = config::elastic_batch_unchecked(config.elasticity(), slots).valid_worlds;
  const auto above = std::upper_bound(worlds.begin(), worlds.end(), slots);
  return above == worlds.begin() ? std::vector<Host>{} : first_slots(std::move(reached), static_cast<int>(above[-1]));
}

std::vector<Host> first_slots(std::vector<Host> hosts, int count) {
  for (Host& host : hosts) {
    host.slots.resize(std::min<size_t>(host.slots.size(), std::max(0, count)));
    count -= static_cast<int>(host.slots.size());
  }
  std::erase_if(hosts, [](const Host& host) { return host.slots.empty(); });
  return hosts;
}

}  // namespace deeptide::launch
