// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks that train together with this engine, and the channels between them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/group.h"
#include "deeptide/config.h"
#include "deeptide/world.h"
#include "host/host.h"
#include "world/failure_board.h"
#include "world/mesh.h"

namespace deeptide::engine {

/// The world as one engine uses it. Every wait of the engine uses one of these channels and reads this clock.
class Channels {
 public:
  /// Collective. Without `world`: init_distributed(). Errors: CommError; ConfigError as init_distributed.
  Channels(const std::optional<World>& world, const Config& config);

  const World& world() const { return world_; }
  const world::Mesh& mesh() const { return mesh_; }
  /// The ranks that train on different batches: shards are spread, and gradients reduced, over them.
  const comm::Team& data() const { return data_; }
  bool is_first() const { return world_.rank == 0; }

  const std::shared_ptr<world::FailureBoard>& board() const { return board_; }
  const std::shared_ptr<host::Host>& host() const { return host_; }
  comm::Clock& clock() { return *clock_; }
  /// Whether the ranks are on several hosts, as far as they may know.
  bool are_between_hosts() const { return between_hosts_; }
  /// What gathers and reductions exchange over the network; null: nobody counts, since ranks share a host.
  const std::shared_ptr<comm::LinkTimes>& links() const { return links_; }

  /// Carries small messages, always on the CPU.
  comm::Group& control() { return control_; }
  /// Carries parameters over the data team.
  comm::Group& gathers() { return gathers_; }
  /// Carries gradients over the data team.
  comm::Group& reductions() { return reductions_; }

 private:
  comm::ChannelOptions options(const Config& config, bool on_device) const;

  World world_;
  world::Mesh mesh_;
  comm::Team data_;
  std::shared_ptr<comm::Clock> clock_;
  std::shared_ptr<world::FailureBoard> board_;
  std::shared_ptr<host::Host> host_;
  bool between_hosts_;
  std::shared_ptr<comm::LinkTimes> links_;
  comm::Group control_;
  comm::Group gathers_;
  comm::Group reductions_;
};

/// Reports to the other ranks if this one fails before `succeed()`. Destroy it before the channels: the other ranks
/// then read its report instead of a broken connection.
class InitFailureNotice {
 public:
  explicit InitFailureNotice(std::shared_ptr<world::FailureBoard> board) : board_(std::move(board)) {}
  InitFailureNotice(const InitFailureNotice&) = delete;
  ~InitFailureNotice() {
    if (board_) board_->report_failure("failed in initialize; see its error");
  }
  void succeed() { board_.reset(); }

 private:
  std::shared_ptr<world::FailureBoard> board_;
};

}  // namespace deeptide::engine
