// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounds in which every rank says what it needs next and hears what the others need: what keeps divergent ranks from
// hanging.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/group.h"

namespace deeptide::comm {

/// One rank's word in a round. Plain data: it travels as bytes.
struct Message {
  static constexpr int kMaxUnits = 24;
  enum class Kind : int32_t {
    gather,  // wants units
    close,   // has ended its micro-batch and only serves until all have
  };
  Kind kind = Kind::gather;
  int32_t num_needs = 0;   // units[0 … num_needs) block this rank
  int32_t num_wishes = 0;  // units[num_needs … num_needs + num_wishes) would be nice soon
  int32_t flags = 0;
  std::array<int32_t, kMaxUnits> units{};
  std::array<int64_t, 6> numbers{};  // of a close: see engine/closing.cc
};

/// Rounds on a channel of their own. At most one round is under way; a rank that has posted its message may go on
/// computing and collect the round later. Every rank takes part in every round, so the sequence of rounds is the same
/// everywhere.
class Rendezvous {
 public:
  explicit Rendezvous(Group& control);

  bool posted() const { return posted_; }
  bool ready() const { return posted_ && pending_.ready(); }
  void post(const Message& message);
  /// Waits for the posted round. Returns one message per rank, in rank order.
  std::vector<Message> collect(const Site& site);
  int64_t rounds() const { return rounds_; }

 private:
  Group& control_;
  at::Tensor out_;
  at::Tensor in_;
  Pending pending_;
  bool posted_ = false;
  int64_t rounds_ = 0;
};

}  // namespace deeptide::comm
