// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds the world from the launcher's variables, or makes a world of one.
#include "deeptide/world.h"

#include <cstdlib>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/interrupt.h"
#include "deeptide/config.h"
#include "trace/flight_log.h"
#include "world/attempt.h"
#include "world/discovery.h"
#include "world/distributed_options.h"
#include "world/meeting.h"

namespace deeptide {
namespace {

World single() {
  World world;
  world.store = c10::make_intrusive<c10d::HashStore>();
  world.source = "single";
  return world;
}

c10::intrusive_ptr<c10d::Store> connect(const Discovery& place, std::chrono::milliseconds timeout) {
  if (!place.file.empty()) {
    auto store = c10::make_intrusive<c10d::FileStore>(place.file, place.size);
    store->setTimeout(timeout);
    return store;
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.port);
  options.isServer = place.rank == 0 && !place.agent_hosts_store;
  options.numWorkers = place.size;
  options.waitWorkers = false;
  options.multiTenant = true;  // a second world of this process uses the same server
  options.timeout = timeout;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  const auto make = [options, place, timeout]() -> StorePtr {
    try {
      return c10::make_intrusive<c10d::TCPStore>(place.address, options);
    } catch (const std::exception& error) {
      const std::string port = std::to_string(options.port), why = std::string(error.what()).substr(0, 300);
      if (why.find("failed to listen") != std::string::npos) {
        throw CommError(
            "rank 0 cannot listen at port " + port +
            ", where the ranks meet; set another one (MASTER_PORT, or the launcher's --master_port): " + why);
      }
      throw CommError("rank " + std::to_string(place.rank) + " could not reach the store at " + place.address + ":" +
                      port + " within " + std::to_string(timeout.count() / 1000) + " s: " + why);
    }
  };
  return run_beside<StorePtr>(make, &check_interrupts);  // it tries until the timeout, whatever signals arrive
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

World init_distributed(const DistributedOptions& options) {
  if (!options.dist_backend.empty() && options.dist_backend != "gloo" && options.dist_backend != "cpu:gloo") {
    throw ConfigError("dist_backend='" + options.dist_backend +
                      "': expected gloo; set World::make_backend to use any other backend");
  }
  if (!options.config.empty()) Config::from_file(options.config);
  const auto environment = world::Environment::of_process();
  const auto place = world::find_place(environment, options);
  return place ? join_world(*place, world::timeout_of(environment, options)) : single();
}

World join_world(const Discovery& place, std::chrono::milliseconds timeout) {
  trace::flight_log();  // makes this rank's position readable from now on
  if (place.address.empty() && place.file.empty()) {
    if (place.size == 1) return single();
    throw ConfigError("a world of " + std::to_string(place.size) + " needs the address of rank 0; got none");
  }
  auto store = connect(place, timeout);
  if (place.agent_hosts_store) store = world::join_attempt(store, place.rank, place.size, timeout);
  World world = make_world(std::move(store), place.rank, place.size);
  world.local_rank = place.local_rank;
  world.source = place.source;
  const char* token = std::getenv("DEEPTIDE_JOB_TOKEN");
  world.store = world::meet(world.store, place.rank, place.size, token ? token : "", timeout);
  return world;
}

}  // namespace deeptide
