// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradient buckets, one a unit, reduced into shards while backward goes on: always in the units' order, always by the
// same sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "gradients/flights.h"

namespace deeptide::gradients {

/// Takes gradients from hooks, reduces them bucket by bucket. A *round* is one reduction of every unit, in the same
/// order on all ranks; a rank lacking a gradient contributes zeros. Ranks may have started different numbers of rounds:
/// `finish` evens that out. Thread-safe.
class Reducer {
 public:
  /// `units`: all trainable units, by position; shards of fp32 accumulators are allocated here, one a unit, unless the
  /// options keep rows.
  /// `exchange`: when all ranks are on one host; buckets then lie in its arena and are summed where they lie.
  Reducer(std::vector<sharding::Unit*> units, comm::Group& group, std::unique_ptr<host::Exchange> exchange,
          std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options);
  ~Reducer();

  /// Adds a gradient of units[unit].parameters()[parameter]. While `set_local(true)`, buckets stay here (stages 0-1
  /// before the boundary); otherwise complete buckets go out.
  void add(int unit, int parameter, const at::Tensor& gradient);
  void set_local(bool local);

  /// Rounds this rank must take part in to empty its buckets; what it tells the others at a micro-batch's end.
  int64_t rounds_wanted() const;
  /// Collective. Completes `rounds` rounds, the maximum over ranks; then all accumulators are final.
  void finish(int64_t rounds);

  bool has_gradient() const { return flights_->has_accumulated(); }
  /// Gradient shard (shard,) of a unit, summed or as its rows; zeros when nothing came. Valid until it is cleared.
  numerics::Contributions gradient(int unit) const { return flights_->gradient(unit); }
  /// Gradients stay as they came until the step: there is no memory for sums.
  bool keeps_rows() const { return options_.keep_rows; }
  /// And they do so in the buckets themselves, which then are the gradients; otherwise where they were received.
  bool buckets_stay() const { return buckets_stay_; }
  /// What its accumulators, or the rows that stay in their place, take on this rank.
  int64_t predicted_gradient_bytes() const;
  /// What buckets on their way take, those of ranks that keep pace.
  int64_t predicted_communication_bytes() const;
  /// Sum of squares of all shards of this rank; non-finite if any gradient is. Valid after `finish`.
  double sum_of_squares() const { return flights_->sum_of_squares(); }
  const std::optional<BadGradient>& bad() const { return flights_->bad(); }
  /// Something came from backward that is not in the accumulators yet.
  bool has_pending() const;
  /// Forgets what is accumulated (after a step).
  void clear_accumulated();
  /// Rounds this rank has begun since the last `finish`: what it tells the others before all of them discard.
  int64_t rounds_begun() const;
  /// Collective. Forgets everything (zero_grad); completes `rounds` rounds first, the maximum over ranks.
  void discard(int64_t rounds);

 private:
  struct Bucket {
    at::Tensor data;            // (numel,), reduce dtype, or fp32 once something was added to it
    std::vector<bool> filled;   // by parameter: `data` holds a gradient
    std::vector<bool> arrived;  // by parameter: came in this micro-batch
    int num_arrived = 0;
  };

  void add_to_bucket(Bucket& bucket, const sharding::Unit& unit, int parameter, const at::Tensor& gradient);
  void issue_complete();
  void issue_next();
  at::Tensor outgoing(int unit);
  bool complete(int unit) const;
  void empty(Bucket& bucket);

  std::vector<sharding::Unit*> units_;
  std::unique_ptr<host::Exchange> exchange_;
  int num_ranks_;
  bool buckets_stay_;
  device::BufferPool pool_;
  ReducerOptions options_;

  mutable std::mutex mutex_;
  std::vector<int> order_;  // unit positions, last module first
  std::vector<Bucket> buckets_;
  std::unique_ptr<Flights> flights_;
  int64_t rounds_done_ = 0;  // issued completely, since the last finish
  size_t next_ = 0;          // in order_, of the round under way
  bool local_ = false;
};

}  // namespace deeptide::gradients
