// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps this rank's part of a state that is known to train, for a return to it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/memory/memory.h"
#include "engine/bind/live_model.h"
#include "engine/run/progress.h"
#include "zero/sharded_optimizer.h"

namespace deeptide {
class Compression;
}

namespace deeptide::engine {

/// One copy in memory of the masters, the optimizer's states and the model's buffers.
class Rewind {
 public:
  struct State {
    std::string role;
    at::Tensor values;
  };
  struct Kept {
    int64_t at = -1;           // optimizer steps at the copy; -1: there is none
    int64_t restored_at = -1;  // likewise at the last return; -1: a step was applied since
    int64_t step = 0;          // the last before the copy
    int64_t schedule_iteration = -1;
    std::map<std::string, int64_t> parameter_steps;
    std::map<std::string, std::vector<double>> parameter_numbers;
    std::vector<std::vector<State>> states;             // by unit
    std::vector<std::vector<PartState>> custom_states;  // by part
    std::vector<NamedTensor> buffers;
    std::string compression;  // the place of its schedule, as Compression::add_state tells it; empty: there is none
  };

  /// `interval`: applied steps after which a newer state replaces the one that is kept. All but `ledger` outlive this.
  Rewind(zero::ShardedOptimizer& optimizer, BoundModel& model, LiveModel& live, std::shared_ptr<device::Ledger> ledger,
         int64_t interval);

  /// Called before each step whose gradients are finite: the state has just proved that it trains. Returns whether it
  /// was kept.
  bool keep_if_due(const Progress& progress, const Compression* compression);
  /// Whether there is a state, and a step was applied since the last return to it.
  bool can_restore(const Progress& progress) const;
  std::string why_not() const;
  /// Collective. Puts the state back, whole on every rank that needs it. Counters of steps taken go on; the optimizer's
  /// and the schedule's place return. Returns the step after which the state was.
  int64_t restore(Progress& progress);
  const Kept& kept() const { return kept_; }
  /// Copies what another one kept of the same model in the same layout.
  void take_over(const Kept& kept);
  /// Memory of the copy, whether it is there already or not.
  int64_t predicted_bytes() const;

 private:
  /// The copy of one state: where the states lie, or, of those in two places, on the host.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype) const;
  void copy_states();

  zero::ShardedOptimizer& optimizer_;
  BoundModel& model_;
  LiveModel& live_;
  std::shared_ptr<device::Ledger> ledger_;
  int64_t interval_;
  Kept kept_;
};

}  // namespace deeptide::engine
