// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps buffers and generators, which forward passes change, as they were when the last step ended.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "engine/bind/live_model.h"
#include "engine/run/progress.h"

namespace deeptide::engine {

/// Masters, moments and counters change in steps only. Buffers and generators change in each forward: a checkpoint
/// saved within an accumulation takes them from here, so that a resume repeats the accumulation from its start.
class LastBoundary {
 public:
  /// Larger buffers are copied only once they have been seen to change: a mask or a table of positions never does.
  /// torch's running statistics, which no version counter counts, are smaller.
  static constexpr size_t kSmallBytes = size_t{1} << 20;

  /// `live` outlives this.
  LastBoundary(LiveModel& live, at::Device device) : live_(live), device_(device) {}

  /// A step has ended, or a load: from now on this is the state.
  void note(int64_t micro_steps);
  /// The program has begun a forward that trains.
  void note_forward() { has_forward_ = true; }
  bool has_forward() const { return has_forward_; }

  const Generators& generators() const { return generators_; }
  int64_t micro_steps() const { return micro_steps_; }
  /// Gives buffers their values of the last boundary. Returns the names of those that have changed since and have no
  /// copy: they keep the value of now.
  std::vector<std::string> restore(std::vector<NamedTensor>& buffers) const;

 private:
  struct Kept {
    NamedTensor now;         // as it was found
    at::Tensor copy;         // undefined: none
    int64_t version = 0;     // of a large one
    bool is_copied = false;  // at each boundary
  };
  static bool holds(const Kept& kept, const NamedTensor& buffer);
  void follow(std::vector<NamedTensor> buffers);

  LiveModel& live_;
  at::Device device_;
  std::vector<Kept> kept_;
  Generators generators_;
  int64_t micro_steps_ = 0;
  bool has_forward_ = false;
};

}  // namespace deeptide::engine
