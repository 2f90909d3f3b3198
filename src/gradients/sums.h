// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// This rank's shards of a step's gradients: summed as they arrive, or kept as rows until the step reads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "device/memory/memory.h"
#include "gradients/cpu_sums.h"
#include "gradients/finite_check.h"
#include "gradients/reducer_options.h"
#include "gradients/unit_gradient.h"
#include "sharding/unit.h"
#include "tiers/offload.h"

namespace deeptide::gradients {

/// Used by one thread at a time. Units are counted by position.
class Sums {
 public:
  /// Each unit gets an accumulator shard, unless rows are kept. Errors: as tiers::Offload, where sums lie in files.
  Sums(const std::vector<sharding::Unit*>& units, int num_ranks, std::shared_ptr<device::Ledger> ledger,
       at::Device device, const ReducerOptions& options);

  /// Consumes a shipment that has arrived. A second one of a unit in one step adds to the first.
  void take(Shipment& shipment);

  // Valid while no shipment is under way.
  UnitGradient gradient(int unit);
  /// Returns `gradient`'s values on the device, which is to step what has left: valid until two more are asked for.
  UnitGradient gradient_on_device(int unit);
  /// Announces that the step is about to read this element of the unit's gradient.
  void prefetch(int unit, int64_t element) const;
  /// Null: sums are in memory.
  const tiers::Offload* files() const { return files_ ? &*files_ : nullptr; }
  /// Whether some elements of sums are in the host's memory, which is not the device's.
  bool leave() const { return cpu_sums_ != nullptr; }
  double sum_of_squares(const FiniteCheck::Read& read = {});
  const std::optional<BadGradient>& bad() const { return check_.bad(); }
  bool has_any() const;
  /// Overwrites elements [begin, begin + values) of the unit's sum; whatever was kept as rows is summed first.
  void overwrite(int unit, int64_t begin, const at::Tensor& values);
  void clear();
  /// While there is none: gives memory of sums back, which later ones take anew.
  void release_memory();

 private:
  void keep(Shipment& shipment);
  void add_kept();
  void add(Shipment& shipment);
  using Visit = std::function<void(tiers::Block block, const at::Tensor& sum)>;
  void change(int unit, bool first, const Visit& visit);
  bool leaves(int unit) const { return cpu_sums_ && cpu_sums_->has(unit); }
  const tiers::Buffer& accumulator(int unit);
  numerics::Contributions contributions(const Shipment& shipment) const;
  at::Tensor squares(int unit) const { return sums_of_squares_.narrow(0, unit, 1); }

  const std::vector<sharding::Unit*> units_;
  const at::Device device_;
  const ReducerOptions options_;
  std::shared_ptr<device::Ledger> ledger_;
  std::optional<tiers::Offload> files_;
  std::vector<tiers::Buffer> accumulators_;  // but for those that leave
  std::unique_ptr<CpuSums> cpu_sums_;        // null: none leaves
  std::vector<Shipment> kept_;               // arrived, not summed; ordered as offered
  std::vector<int> kept_at_;                 // by unit: its index in kept_, or -1
  std::vector<bool> has_;                    // by unit: holds something since the last clear
  at::Tensor sums_of_squares_;               // (units,), fp64
  FiniteCheck check_;
};

}  // namespace deeptide::gradients
