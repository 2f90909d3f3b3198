// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks that train together with this engine, and the channels between them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/rounds.h"
#include "comm/team_groups.h"
#include "deeptide/config.h"
#include "deeptide/world.h"
#include "engine/bind/stages.h"
#include "engine/design/design.h"
#include "host/host.h"
#include "world/failure_board.h"
#include "world/mesh.h"

namespace deeptide::engine {

/// The world as one engine uses it. Every wait of the engine uses one of these channels and reads this clock.
class Channels {
 public:
  using Purpose = ChannelRow::Purpose;

  /// Collective. Without `world`: init_distributed(). `axes`: of its ranks; null: all of them are on the data axis.
  /// Errors: CommError; ConfigError as init_distributed, and if the axes have another number of ranks.
  Channels(const std::optional<World>& world, const Config& config, const Axes* axes);

  /// These ranks as a design knows them.
  const Topology& topology() const { return topology_; }
  /// Errors name the engine by its model's type where a rank has several.
  void name_engine(const std::string& model) { board_->name_engine(model); }
  /// Collective. Opens the channels of a design that are not there yet.
  void open(const std::vector<ChannelRow>& rows);
  /// Collective. Runs the channels' first collectives on the model's device. NCCL connects a group's ranks in its first
  /// ones, on the host, which waits for all ranks: in backward they could be waiting for this one.
  /// Errors: CommError.
  void connect(at::Device device);
  /// Carries parameters, or gradients, over this team. It is open.
  comm::Group& of(const comm::Team& team, Purpose purpose) { return all(purpose).of(team); }
  /// Those of every team.
  comm::TeamGroups all(Purpose purpose);

  const World& world() const { return world_; }
  const world::Mesh& mesh() const { return topology_.mesh; }
  /// The ranks that train on different batches. All of them take part in every round.
  const comm::Team& data() const { return data_; }
  bool is_first() const { return world_.rank == 0; }
  /// Collective over the mesh. A channel of its own for letters between any two ranks.
  std::unique_ptr<comm::Group> open_letters();
  /// The other stages of a pipeline; null: there is none.
  Stages* stages() { return stages_.get(); }
  /// The ranks that share layers with this one; null: there are none.
  TensorTeam* tensor_team() { return tensor_team_.get(); }

  const std::shared_ptr<world::FailureBoard>& board() const { return board_; }
  const std::shared_ptr<host::Host>& host() const { return host_; }
  comm::Clock& clock() { return *clock_; }
  /// Records how this engine spends its time.
  const std::shared_ptr<trace::Recorder>& recorder() const { return recorder_; }
  /// Whether the ranks are on several hosts, as far as they may know.
  bool are_between_hosts() const { return between_hosts_; }
  /// Counts traffic of gathers and reductions over the network; null: nobody counts, since ranks share a host.
  const std::shared_ptr<comm::LinkTimes>& links() const { return links_; }

  /// Carries small messages, always on the CPU.
  comm::Group& control() { return control_; }
  /// Rounds and votes over `control`.
  comm::Rounds& rounds() { return rounds_; }
  /// Carries parameters over the data team.
  comm::Group& gathers() { return gathers_; }
  /// Carries gradients over the data team.
  comm::Group& reductions() { return reductions_; }

 private:
  comm::ChannelOptions options(bool on_device) const;

  World world_;
  const std::chrono::milliseconds timeout_;
  Topology topology_;
  comm::Team data_;
  std::shared_ptr<comm::Clock> clock_;
  std::shared_ptr<trace::Recorder> recorder_;
  std::shared_ptr<world::FailureBoard> board_;
  std::shared_ptr<host::Host> host_;
  bool between_hosts_;
  std::shared_ptr<comm::LinkTimes> links_;
  comm::Group control_;
  comm::Rounds rounds_;
  comm::Group gathers_;
  comm::Group reductions_;
  std::vector<std::unique_ptr<comm::Group>> of_parts_[2];  // by purpose: over other teams
  std::unique_ptr<Stages> stages_;
  std::shared_ptr<TensorTeam> tensor_team_;
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
