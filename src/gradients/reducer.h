// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradient buckets, one a unit, reduced into shards while backward goes on: always in the units' order, always by the
// same sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/host_exchange.h"
#include "device/memory.h"
#include "sharding/unit.h"

namespace deeptide::gradients {

/// Buckets under way at a time while every rank keeps pace; each has what it sends and, but for shared memory, what it
/// receives.
inline constexpr size_t kMaxFlights = 2;

struct ReducerOptions {
  at::ScalarType reduce_dtype = at::kFloat;  // on the wire
  bool ordered = true;                       // sum in rank order in fp32; false: the transport's own reduction
  bool overlap = true;                       // start reductions during backward
  double scale = 1.0;                        // 1 / (world * accumulation), applied to the sum
};

/// A gradient that is not finite.
struct BadGradient {
  std::string parameter;
  int rank = -1;  // that produced it; -1: every contribution was finite, the sum was not
};

/// Takes gradients from hooks, reduces them bucket by bucket. A *round* is one reduction of every unit, in the same
/// order on all ranks; a rank lacking a gradient contributes zeros. Ranks may have started different numbers of rounds:
/// `finish` evens that out. Thread-safe.
class Reducer {
 public:
  /// `units`: all trainable units, by position; shards of fp32 accumulators are allocated here, one a unit.
  /// `exchange`: when all ranks are on one host; buckets then lie in its arena and are summed where they lie.
  Reducer(std::vector<sharding::Unit*> units, comm::Group& group, std::unique_ptr<comm::HostExchange> exchange,
          std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options);
  ~Reducer();

  /// Adds a gradient of units[unit].parameters()[parameter]. While `set_local(true)`, buckets stay here (stages 0-1
  /// before the boundary); otherwise complete buckets go out.
  void add(int unit, int parameter, const at::Tensor& gradient);
  void set_local(bool local);
  void set_step(int64_t step) { step_ = step; }

  /// Rounds this rank must take part in to empty its buckets; what it tells the others at a micro-batch's end.
  int64_t rounds_wanted() const;
  /// Collective. Completes `rounds` rounds, the maximum over ranks; then all accumulators are final.
  void finish(int64_t rounds);

  bool has_gradient() const { return has_accumulated_; }
  /// fp32 gradient shard (shard,) of a unit; zeros when nothing came.
  const at::Tensor& accumulator(int unit) const { return accumulators_[unit]; }
  /// Sum of squares of all shards of this rank; non-finite if any gradient is. Valid after `finish`.
  double sum_of_squares() const;
  const std::optional<BadGradient>& bad() const { return bad_; }
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
  struct Flight {
    int unit;
    at::Tensor sent;
    at::Tensor received;  // (world * shard,), or (shard,) from the transport's own reduction; none in shared memory
    comm::Pending pending;
    uint32_t offer = 0;  // in shared memory
  };
  /// Summed here, but perhaps not yet by all who read it.
  struct Lent {
    at::Tensor sent;
    uint32_t offer;
  };

  void add_to_bucket(Bucket& bucket, const sharding::Unit& unit, int parameter, const at::Tensor& gradient);
  void issue_complete();
  void issue(int position);
  at::Tensor outgoing(int unit);
  void retire_front();
  void limit_flights();
  std::vector<at::Tensor> rows(const Flight& flight) const;
  void give_back(Flight& flight);
  void reclaim();
  void record_bad(int unit, at::TensorList rows);
  bool complete(int unit) const;
  void empty(Bucket& bucket);
  comm::Site site(int unit) const;

  std::vector<sharding::Unit*> units_;
  comm::Group& group_;
  std::unique_ptr<comm::HostExchange> exchange_;
  std::shared_ptr<device::Ledger> ledger_;
  device::BufferPool buckets_pool_;
  device::BufferPool receive_pool_;
  ReducerOptions options_;

  mutable std::mutex mutex_;
  std::vector<int> order_;  // unit positions, last module first
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> accumulators_;
  std::vector<bool> accumulated_;  // by unit: holds something since the last clear
  at::Tensor sums_of_squares_;     // (units,), fp64
  std::deque<Flight> flights_;
  std::deque<Lent> lent_;
  std::optional<BadGradient> bad_;
  int64_t rounds_done_ = 0;  // issued completely, since the last finish
  size_t next_ = 0;          // in order_, of the round under way
  bool local_ = false;
  bool has_accumulated_ = false;
  bool peers_elsewhere_ = false;  // the flight in front was waited for in vain
  int64_t step_ = 0;
};

}  // namespace deeptide::gradients
