// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The point where all ranks meet: every collective method enters here, and ranks agree here on what failed.
#pragma once

#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "comm/messages.h"
#include "deeptide/errors.h"
#include "engine/bind/bound_model.h"
#include "engine/bind/channels.h"
#include "gradients/reducer.h"
#include "sharding/residency.h"
#include "zero/transfers/arrivals.h"

namespace deeptide::engine {

/// Returns the method as the user calls it: "step()", "save_checkpoint()".
const char* call_name(comm::Call call);

/// Returns the largest number of rounds that any rank has requested.
int64_t most_rounds(const std::vector<comm::Close>& closes);

/// Returns the first rank that still trains, or the first of all if all have joined.
const comm::Close& leading(const std::vector<comm::Close>& closes);

/// Returns the method that the ranks are in: that of the leading rank, or preempt() if some rank has called it.
comm::Call call_of(const std::vector<comm::Close>& closes);

class Preemption;
class Saver;

class Boundary {
 public:
  /// `reducer`: null if there is nothing to train; `arrivals`: null if steps wait for what they publish.
  Boundary(Channels& channels, BoundModel& model, sharding::Residency& residency, gradients::Reducer* reducer,
           zero::Arrivals* arrivals)
      : channels_(channels), model_(model), residency_(residency), reducer_(reducer), arrivals_(arrivals) {}

  /// From now on ranks agree here on the saves of `saver`, and that one was asked to go. Both outlive this.
  void watch(Saver& saver, Preemption& preemption) {
    saver_ = &saver;
    preemption_ = &preemption;
  }

  /// `take`: takes the gradients that rounds_wanted_with was told of. It is called while this rank waits for ranks that
  /// cannot go on without them; else they are taken once all ranks' checks have passed.
  void take_early_by(std::function<void()> take) { take_early_ = std::move(take); }

  /// From now on steps and saves are a CheckpointError of this text, on all ranks alike, until go_on().
  void refuse_to_go_on(std::string why) { refusal_ = std::move(why); }
  void go_on() { refusal_.clear(); }
  bool refuses_to_go_on() const { return !refusal_.empty(); }

  /// Collective. Looks at the model, then at what `prepare` checks and fills in; returns each rank's message once all
  /// ranks are in one method and need no more units. Parameters then hold what programs wrote into them.
  /// Errors: CommError naming ranks that call different methods. What failed on one rank is thrown there; the other
  /// ranks name it. All may continue afterwards: nothing was changed.
  std::vector<comm::Close> enter(comm::Call call, const std::function<void(comm::Close&)>& prepare = {});

  /// Collective, after `enter`: every rank receives every rank's message.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const comm::Site& site) {
    return channels_.rounds().exchange(own, site);
  }

  /// Collective, after `enter`: every rank receives every rank's values, equally many, one rank after the other.
  template <typename Value>
  std::vector<Value> exchange_all(std::span<const Value> own, const comm::Site& site) {
    return channels_.rounds().exchange_all(own, site);
  }

  /// Collective, after `enter`. Runs `work` on this rank, and throws on every rank if it failed on any.
  /// `what`: "writing the checkpoint". Errors: CheckpointError.
  template <typename Work>
  void together(const char* what, Work work) {
    std::string failure;
    try {
      work();
    } catch (const std::exception& error) {
      failure = *error.what() ? error.what() : what;
    }
    vote(what, failure);
  }
  /// Like `together`, collective over all stages of a pipeline: throws on every rank of each.
  void together_on_all_stages(const char* what, const std::function<void()>& work);

 private:
  std::vector<comm::Close> close(const comm::Close& own, bool ends_pass);
  void check_calls(const std::vector<comm::Close>& closes) const;
  [[noreturn]] void refuse_step(const std::vector<comm::Close>& closes) const;
  void check_failures(const std::vector<comm::Close>& closes, const std::exception_ptr& own) const;
  void vote(const char* what, const std::string& failure);
  bool has_private_writes() const;
  void take_private_writes(const std::vector<comm::Close>& closes);

  Channels& channels_;
  BoundModel& model_;
  sharding::Residency& residency_;
  gradients::Reducer* reducer_;
  zero::Arrivals* arrivals_;
  Saver* saver_ = nullptr;
  Preemption* preemption_ = nullptr;
  std::function<void()> take_early_;
  std::string refusal_;  // of steps and saves; empty: none
};

}  // namespace deeptide::engine
