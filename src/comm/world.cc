// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finding the world: launcher, torchrun, or alone.
#include "deeptide/world.h"

#include <cstdlib>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace deeptide {
namespace {

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? std::optional<std::string>(value) : std::nullopt;
}

int number(const char* name, const std::string& text, int low, int high) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (*end != '\0' || value < low || value > high) {
    throw ConfigError(std::string("environment variable ") + name + "=" + text + ": expected a number from " +
                      std::to_string(low) + " to " + std::to_string(high));
  }
  return static_cast<int>(value);
}

World single() {
  World world;
  world.store = c10::make_intrusive<c10d::HashStore>();
  world.source = "single";
  return world;
}

}  // namespace

World make_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& host) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw ConfigError("rank " + std::to_string(rank) + " of a world of " + std::to_string(size) +
                      ": expected 0 <= rank < size");
  }
  World world;
  world.rank = rank;
  world.size = size;
  world.local_rank = rank;
  world.store = std::move(store);
  world.host = host;
  world.source = "threads";
  return world;
}

World init_distributed(std::chrono::milliseconds timeout) {
  const char* names[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
  std::string missing;
  int found = 0;
  for (const char* name : names) {
    if (environment(name)) {
      ++found;
    } else {
      missing += std::string(missing.empty() ? "" : ", ") + name;
    }
  }
  if (!environment("RANK") && !environment("WORLD_SIZE")) return single();
  if (found != 4) {
    throw ConfigError("the environment describes a world in part only; missing: " + missing +
                      ". Start with `deeptide` or `torchrun`, or unset RANK and WORLD_SIZE for a world of one.");
  }
  World world;
  world.size = number("WORLD_SIZE", *environment("WORLD_SIZE"), 1, 1 << 20);
  world.rank = number("RANK", *environment("RANK"), 0, world.size - 1);
  world.local_rank = environment("LOCAL_RANK") ? number("LOCAL_RANK", *environment("LOCAL_RANK"), 0, 1 << 16) : 0;
  world.source = environment("TORCHELASTIC_RUN_ID") ? "torchrun" : "deeptide";
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(number("MASTER_PORT", *environment("MASTER_PORT"), 1, 65535));
  const bool agent_hosts_store = environment("TORCHELASTIC_USE_AGENT_STORE") == std::optional<std::string>("True");
  options.isServer = world.rank == 0 && !agent_hosts_store;
  options.numWorkers = world.size;
  options.waitWorkers = false;
  options.timeout = timeout;
  const std::string address = *environment("MASTER_ADDR");
  try {
    world.store = c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const std::exception& error) {
    throw CommError("rank " + std::to_string(world.rank) + " could not reach the store at " + address + ":" +
                    std::to_string(options.port) + " within " + std::to_string(timeout.count() / 1000) +
                    " s: " + std::string(error.what()).substr(0, 300));
  }
  return world;
}

}  // namespace deeptide
