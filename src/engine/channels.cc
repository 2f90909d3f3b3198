// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts channel names per store, so that engines of one process do not mix.
#include "engine/channels.h"

#include "engine/choices.h"

namespace deeptide::engine {
namespace {

/// Returns a name equal on all ranks: all ranks make their engines in one order, counted per store.
std::string next_channel_name(const World& world, const char* kind) {
  const std::string key = std::string("deeptide/engines/") + kind + "/" + std::to_string(world.rank);
  return std::to_string(world.store->add(key, 1)) + "/" + kind;
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// Of the world, on this host.
std::vector<int> ranks_of(const host::Host& host, const comm::Team& team) {
  std::vector<int> ranks;
  for (const int index : host.ranks()) ranks.push_back(team.ranks()[static_cast<size_t>(index)]);
  return ranks;
}

}  // namespace

Channels::Channels(const std::optional<World>& world, const Config& config)
    : world_(world ? *world : init_distributed()),
      mesh_(world::Mesh::data_parallel(world_.size)),
      data_(comm::Team::along(mesh_, world_.rank, {world::Axis::data})),
      clock_(std::make_shared<comm::Clock>()),
      board_(std::make_shared<world::FailureBoard>(world_, "deeptide/board/" + next_channel_name(world_, "board"),
                                                   milliseconds_of(config.runtime().error_grace_s))),
      host_(host::Host::find(data_.within(world_), "deeptide/host/" + next_channel_name(world_, "host"),
                             may_share_memory(config), board_)),
      between_hosts_(config.runtime().shared_memory && !host_->holds_all()),
      links_(between_hosts_ ? std::make_shared<comm::LinkTimes>(ranks_of(*host_, data_)) : nullptr),
      control_(world_, data_, next_channel_name(world_, "control"), options(config, /*on_device=*/false)),
      gathers_(world_, data_, next_channel_name(world_, "gathers"), options(config, /*on_device=*/true)),
      reductions_(world_, data_, next_channel_name(world_, "reductions"), options(config, /*on_device=*/true)) {}

comm::ChannelOptions Channels::options(const Config& config, bool on_device) const {
  return {.timeout = milliseconds_of(config.runtime().comm_timeout_s),
          .board = board_,
          .host = host_,
          .clock = clock_,
          .on_device = on_device,
          .links = on_device ? links_ : nullptr};  // what waits for the other ranks' small messages is no link
}

}  // namespace deeptide::engine
