// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The point where all ranks meet: every collective method enters here, and ranks agree here on what failed.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "comm/messages.h"
#include "deeptide/errors.h"
#include "engine/bound_model.h"
#include "engine/channels.h"
#include "sharding/residency.h"

namespace deeptide::engine {

/// Returns the method as the user calls it: "step()", "save_checkpoint()".
const char* call_name(comm::Call call);

/// Returns the largest number of rounds that any rank has requested.
int64_t most_rounds(const std::vector<comm::Close>& closes);

/// Returns the first rank that still trains, or the first of all if all have joined.
const comm::Close& leading(const std::vector<comm::Close>& closes);

class Boundary {
 public:
  Boundary(Channels& channels, BoundModel& model, sharding::Residency& residency)
      : channels_(channels), model_(model), residency_(residency) {}

  /// Collective. Returns each rank's message once all ranks are in one method and need no more units. Shared parameters
  /// then hold what programs wrote into them. Errors: CommError naming ranks that call different methods.
  std::vector<comm::Close> enter(comm::Close own);

  /// Collective, after `enter`: every rank receives every rank's message.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const comm::Site& site) {
    return residency_.exchange(own, site);
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

 private:
  void vote(const char* what, const std::string& failure);
  bool has_private_writes() const;
  void take_private_writes(const std::vector<comm::Close>& closes);

  Channels& channels_;
  BoundModel& model_;
  sharding::Residency& residency_;
};

}  // namespace deeptide::engine
