// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The places where all ranks stand together: every collective method enters here, and agrees here on what went wrong.
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

/// "step()", "save_checkpoint()": as the user calls it.
const char* call_name(comm::Call call);

/// The largest number of rounds that any rank has asked for.
int64_t most_rounds(const std::vector<comm::Close>& closes);

/// The first rank that still trains; 0 when all have joined.
const comm::Close& leading(const std::vector<comm::Close>& closes);

class Boundary {
 public:
  Boundary(Channels& channels, BoundModel& model, sharding::Residency& residency)
      : channels_(channels), model_(model), residency_(residency) {}

  /// Collective. Returns when all ranks are in the same method and need no more units, with what each said. Parameters
  /// in shared memory hold what programs wrote into them. Errors: CommError naming ranks that call different methods.
  std::vector<comm::Close> enter(comm::Close own);

  /// Collective, after `enter`: every rank hears every rank's message.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const comm::Site& site) {
    return residency_.exchange(own, site);
  }

  /// Collective, after `enter`. Runs `work` on this rank, and throws on every rank when it failed on any.
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
