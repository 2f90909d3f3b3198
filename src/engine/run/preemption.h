// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Notices the signals by which a scheduler asks a run to save and go.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "deeptide/config.h"
#include "engine/bind/channels.h"

namespace deeptide::engine {

/// Handles the configuration's signals while it lives, in place of the process's handlers. Without "on_preempt" it
/// does nothing.
class Preemption {
 public:
  Preemption(Channels& channels, const CheckpointConfig& config);
  ~Preemption();
  Preemption(const Preemption&) = delete;

  bool is_on() const { return !signals_.empty(); }
  /// Whether this rank got a signal, or knows of another one's. Tells the others of the first one, through the store.
  bool is_asked();
  /// All ranks know it, from what they said of themselves as they met.
  void agree() { agreed_ = true; }
  bool is_agreed() const { return agreed_; }
  /// Whether a rank was asked so long ago that half of the deadline is over. Asks the store once a second.
  bool is_pressing();

 private:
  void look();

  Channels& channels_;
  const CheckpointConfig& config_;
  std::vector<int> signals_;
  bool agreed_ = false, told_ = false, asked_ = false;
  std::chrono::steady_clock::time_point asked_at_, looked_at_;
};

}  // namespace deeptide::engine
