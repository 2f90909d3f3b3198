// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors from rank to rank, of any shape and type, known to the receiver or told to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/group.h"

namespace deeptide::comm {

/// Carries a pipeline stage's tensors. Letters from one rank to another arrive in the order in which they were sent and
/// are received; letters of different pairs, and of both directions, do not wait for each other. A sender never waits:
/// its letters leave while it waits for others, or by themselves where the transport moves bytes alone.
/// Used by one thread. The group, made with PeerTraffic::yes, serves nothing else meanwhile.
class Mailbox {
 public:
  /// Most dimensions of a tensor whose shape travels.
  static constexpr int64_t kMostDims = 13;

  /// `device`: where tensors lie whose shape travels.
  Mailbox(Group& peers, at::Device device) : peers_(peers), device_(device), from_(peers.size()) {}

  /// A tensor that comes.
  class Letter {
   public:
    Letter() = default;
    bool valid() const { return state_ != nullptr; }

   private:
    friend class Mailbox;
    struct State;
    std::shared_ptr<State> state_;
  };

  /// `known`: the receiver knows type and shape, and calls the receive that takes a tensor. `told`: they travel ahead
  /// of it. Both keep the tensor, which must not change until `flush`; one that is not contiguous is copied. Indices
  /// are the team's. Errors: ValueError for a tensor to this rank, or one of too many dimensions to tell.
  void send_known(const at::Tensor& tensor, int to) { post(tensor, to); }
  void send_told(const at::Tensor& tensor, int to);

  /// Fills `tensor`, contiguous, from one of an equal type and shape.
  Letter receive_known(at::Tensor tensor, int from) { return add(from, std::move(tensor)); }
  /// Receives a new tensor of the sender's type and shape.
  Letter receive_told(int from) { return add(from, {}); }

  /// Goes on with what is under way; never waits. Errors: CommError if a peer is lost.
  void go_on(const Site& site);
  /// Waits at most about `limit`; returns whether the letter is there. Errors: as Group::wait_for.
  bool wait_for(Letter& letter, std::chrono::milliseconds limit, const Site& site);
  /// Waits for the letter and returns its tensor. `meanwhile`, if any, is called at once and then every few
  /// milliseconds: a rank serves others there, who may be what its neighbour waits for.
  /// Errors: as Group::wait; CommError if what was told makes no sense: the ranks' calls differ.
  at::Tensor wait(Letter letter, const Site& site, const std::function<void()>& meanwhile = {});
  /// Waits until all that this rank has sent may be changed. Errors: as Group::wait.
  void flush(const Site& site, const std::function<void()>& meanwhile = {});
  /// Tensors that have not been sent whole yet, with what tells of them.
  size_t num_sends_under_way() const { return sends_.size(); }

 private:
  using StatePtr = std::shared_ptr<Letter::State>;

  void post(const at::Tensor& tensor, int to);
  Letter add(int from, at::Tensor tensor);
  void start_due(int from);
  StatePtr current(const Letter& letter) const;
  void end_sends(const Site& site);
  /// `from`: whose letter it is; none: it was sent from here.
  void wait(Pending& pending, std::optional<int> from, const Site& site, const std::function<void()>& meanwhile);

  Group& peers_;
  at::Device device_;
  std::deque<Pending> sends_;               // not known to have ended
  std::vector<std::deque<StatePtr>> from_;  // by rank: letters whose bytes have not been asked for, the first one's
                                            // shape perhaps under way
};

}  // namespace deeptide::comm
