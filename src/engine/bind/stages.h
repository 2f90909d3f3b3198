// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The stages of a pipeline as one of their ranks sees them: votes over all of them, and letters from one to another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/mailbox.h"
#include "comm/rounds.h"
#include "comm/team.h"
#include "deeptide/world.h"
#include "world/mesh.h"

namespace deeptide::engine {

/// The options of a channel whose ranks write to each other over the network, wherever they are.
comm::ChannelOptions on_network(comm::ChannelOptions options, comm::PeerTraffic peers);

/// One rank of each stage: those that train on the same batches. Used by one thread.
class Stages {
 public:
  /// Collective over all ranks. Names: of the two channels.
  Stages(const World& world, const world::Mesh& mesh, const std::string& control, const std::string& letters,
         const comm::ChannelOptions& options);

  const comm::Team& team() const { return team_; }
  /// This rank's stage; the first is 0.
  int index() const { return team_.index(); }
  int size() const { return team_.size(); }
  comm::Group& control() { return control_; }

  /// Collective over the team, at a point that all stages come to in one order: every rank receives every stage's
  /// message, in the stages' order. Errors: as Group::wait; CommError on all stages if one of them has come to another
  /// exchange, as where one alone has caught an error.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const comm::Site& site) {
    return exchange_all(std::span<const Message>(&own, 1), site);
  }
  template <typename Value>
  std::vector<Value> exchange_all(std::span<const Value> own, const comm::Site& site) {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> all(own.size() * static_cast<size_t>(size()));
    exchange_bytes(own.data(), all.data(), own.size_bytes(), site);
    return all;
  }

  comm::Mailbox& mail() { return mail_; }
  /// Asks for the next tensor of a stage, of this type and shape; returns a number for `take`.
  int64_t expect(const at::Tensor& tensor, int from);
  /// Waits for it, calling `meanwhile` as Mailbox::wait does. Errors: ValueError for a number that is not due.
  at::Tensor take(int64_t letter, const comm::Site& site, const std::function<void()>& meanwhile);

  /// A backward has passed this stage. `take_backward` tells whether one has since it was last asked.
  void note_backward() { has_backward_ = true; }
  bool take_backward() { return std::exchange(has_backward_, false); }

 private:
  void exchange_bytes(const void* own, void* all, size_t bytes, const comm::Site& site);

  comm::Team team_;
  comm::Group control_;
  comm::Rounds votes_;
  comm::Group peers_;
  comm::Mailbox mail_;
  std::map<int64_t, comm::Mailbox::Letter> letters_;  // asked for and not taken, by number
  int64_t last_ = 0;
  bool has_backward_ = false;
};

}  // namespace deeptide::engine
