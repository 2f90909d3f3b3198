// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Overrides the environment's variables with the program's options before discovery reads them.
#include "world/distributed_options.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/log.h"

namespace deeptide::world {
namespace {

using std::chrono::milliseconds;
using Text = std::optional<std::string>;

/// The meeting point that an init_method states; empty: none.
struct MeetingPoint {
  std::string address, port, file;
  bool empty() const { return address.empty() && file.empty(); }
};

bool is_port(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= 65535;
}

MeetingPoint parse(const std::string& method) {
  if (method.empty() || method == "env://") return {};
  constexpr std::string_view kTcp = "tcp://", kFile = "file://";
  if (method.starts_with(kFile) && method.size() > kFile.size()) return {"", "", method.substr(kFile.size())};
  const size_t colon = method.rfind(':');
  if (method.starts_with(kTcp) && colon > kTcp.size()) {
    std::string address = method.substr(kTcp.size(), colon - kTcp.size()), port = method.substr(colon + 1);
    if (address.front() == '[' && address.back() == ']') address = address.substr(1, address.size() - 2);
    if (is_port(port)) return {address, port, ""};
  }
  throw ConfigError("init_method='" + method + "': expected tcp://HOST:PORT, file://PATH or env://");
}

void check(const DistributedOptions& options) {
  const std::string given =
      "rank=" + std::to_string(options.rank) + ", world_size=" + std::to_string(options.world_size);
  if ((options.rank < 0) != (options.world_size < 0)) {
    throw ConfigError(given + ": give both, or neither to let Deeptide discover them");
  }
  if (options.rank >= 0 && options.rank >= options.world_size) {
    throw ConfigError(given + ": expected 0 <= rank < world_size");
  }
  if (options.dist_init_required == false) {
    throw ConfigError(
        "dist_init_required is false, but no world has been initialised; omit it, or pass the existing world (in "
        "Python: the process group)");
  }
}

/// Hides the variables that only MPI, SLURM and similar launchers set.
Environment without_launchers(const Environment& environment) {
  static constexpr std::string_view kNames[] = {"RANK",
                                                "WORLD_SIZE",
                                                "LOCAL_RANK",
                                                "LOCAL_WORLD_SIZE",
                                                "LOCAL_SIZE",
                                                "MASTER_ADDR",
                                                "MASTER_PORT",
                                                "TORCHELASTIC_RUN_ID",
                                                "TORCHELASTIC_USE_AGENT_STORE",
                                                "DEEPTIDE_JOB_ID",
                                                "DEEPTIDE_JOB_TOKEN"};
  return {[environment](const std::string& name) -> Text {
            const bool kept = std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
            return kept ? environment.variable(name) : std::nullopt;
          },
          environment.host_name};
}

/// Sets `name` to `value`; with `weak`, only if the environment does not set it.
Environment with(const Environment& environment, const std::string& name, const std::string& value, bool weak = false) {
  return {[=](const std::string& asked) -> Text {
            const Text found = asked == name && !weak ? std::nullopt : environment.variable(asked);
            return asked == name && !found ? Text(value) : found;
          },
          environment.host_name};
}

/// Returns the environment with the options applied.
Environment seen(Environment environment, const DistributedOptions& options, const MeetingPoint& point) {
  if (options.rank >= 0) {
    environment = with(without_launchers(environment), "RANK", std::to_string(options.rank));
    environment = with(environment, "WORLD_SIZE", std::to_string(options.world_size));
    environment = with(environment, "MASTER_ADDR", "127.0.0.1", /*weak=*/true);
    environment = with(environment, "MASTER_PORT", std::to_string(options.distributed_port), /*weak=*/true);
  } else if (!options.auto_mpi_discovery) {
    environment = without_launchers(environment);
  }
  if (point.empty()) return environment;
  // A file:// rendezvous has no address or port; placeholders keep discovery from reporting them missing.
  environment = with(environment, "MASTER_ADDR", point.file.empty() ? point.address : "127.0.0.1");
  return with(environment, "MASTER_PORT", point.file.empty() ? point.port : std::to_string(kDefaultPort));
}

std::string text_of(const Discovery& place) {
  std::string text = "a world of " + std::to_string(place.size) + " from " + place.source;
  if (!place.file.empty()) return text + ", at " + place.file;
  return place.address.empty() ? text : text + ", at " + place.address + ":" + std::to_string(place.port);
}

}  // namespace

std::optional<Discovery> find_place(const Environment& environment, const DistributedOptions& options) {
  check(options);
  const MeetingPoint point = parse(options.init_method);
  std::optional<Discovery> place = discover(seen(environment, options, point), options.distributed_port);
  if (!place) {
    if (point.empty()) return std::nullopt;
    throw ConfigError(
        "init_method='" + options.init_method +
        "' gives the meeting point, but no argument or variable gives the rank of this process; pass rank and "
        "world_size, or start with `deeptide` or `torchrun`");
  }
  if (options.rank >= 0) {
    place->source = "arguments";
    place->agent_hosts_store = false;
  }
  if (!point.empty()) {
    const bool is_agents =
        environment.variable("MASTER_ADDR") == point.address && environment.variable("MASTER_PORT") == point.port;
    place->agent_hosts_store = place->agent_hosts_store && is_agents;
  }
  if (!point.file.empty()) {
    place->file = point.file;
    place->address.clear();
    place->port = 0;
  }
  if (options.verbose && place->rank == 0) log(LogLevel::debug, text_of(*place));
  return place;
}

milliseconds timeout_of(const Environment& environment, const DistributedOptions& options) {
  if (options.timeout) {
    if (options.timeout->count() > 0) return *options.timeout;
    throw ConfigError("timeout=" + std::to_string(options.timeout->count()) + " ms: expected more than 0");
  }
  const std::string text = environment.variable("DEEPSPEED_TIMEOUT").value_or("10");
  int64_t minutes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), minutes);
  if (error != std::errc() || end != text.data() + text.size() || minutes < 1 || minutes > 1'000'000) {
    throw ConfigError("environment variable DEEPSPEED_TIMEOUT=" + text +
                      ": expected a number of minutes, at least 1 and at most 1000000");
  }
  return std::chrono::minutes(minutes);
}

}  // namespace deeptide::world
