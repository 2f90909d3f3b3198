// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounds in which every rank states what it needs next and learns what the others need. They keep divergent ranks from
// hanging.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#include "comm/group.h"
#include "comm/messages.h"

namespace deeptide::comm {

/// Runs rounds on a channel of their own. At most one round is under way. A rank that has posted its word may continue
/// computing and collect the round later. Every rank takes part in every round, so all ranks share one sequence of
/// rounds.
class Rendezvous {
 public:
  explicit Rendezvous(Group& control);

  bool posted() const { return posted_; }
  bool ready() const { return posted_ && pending_.ready(); }
  void post(const Word& word);
  /// Waits for the posted round. Returns one word per rank, in the team's order. `meanwhile`: as in Group::wait.
  std::vector<Word> collect(const Site& site, const std::function<void()>& meanwhile = {});
  int64_t rounds() const { return rounds_; }

  /// Collective, between rounds: every rank receives every rank's bytes, equally many, in the team's order.
  void exchange_bytes(const void* own, void* all, size_t bytes, const Site& site);

  /// Collective, between rounds: every rank receives every rank's message, in the team's order.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const Site& site) {
    static_assert(std::is_trivially_copyable_v<Message>);
    std::vector<Message> messages(control_.size());
    exchange_bytes(&own, messages.data(), sizeof(Message), site);
    return messages;
  }

 private:
  Group& control_;
  at::Tensor out_;
  at::Tensor in_;
  Pending pending_;
  bool posted_ = false;
  int64_t rounds_ = 0;
};

}  // namespace deeptide::comm
