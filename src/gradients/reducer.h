// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradient buckets, one per unit, reduced into shards during backward: always in the units' order, always by one sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "gradients/arriving.h"
#include "gradients/bucket_queue.h"
#include "gradients/forecast.h"
#include "gradients/held_gradients.h"
#include "gradients/sums.h"
#include "sharding/residency.h"

namespace deeptide::gradients {

/// Takes gradients from hooks and reduces them bucket by bucket. A *round* is one reduction of every unit, in one order
/// on all ranks; a rank lacking a gradient contributes zeros. Ranks may have started different numbers of rounds:
/// `finish` evens that out. Thread-safe.
class Reducer {
 public:
  /// `units`: all trainable units, by position. Allocates an accumulator shard per unit, unless the options keep
  /// rows. Errors: as tiers::Offload, where sums lie in files.
  /// `exchange`: among the ranks of this host, if those are all, or if the options sum what they contribute before it
  /// travels; buckets then lie in its arena, and are summed in place.
  /// `residency`: serves the others while this rank waits because it is too far ahead, and tells those that have no
  /// more gradients how many rounds it has begun; null: it only waits.
  Reducer(std::vector<sharding::Unit*> units, const comm::TeamGroups& groups, std::unique_ptr<host::Exchange> exchange,
          std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options,
          sharding::Residency* residency = nullptr);
  ~Reducer();

  /// Adds a gradient of units[unit].parameters()[parameter]. After `set_local(true)`, buckets stay here (stages 0-1
  /// before the boundary); otherwise complete buckets are sent.
  void add(int unit, int parameter, Arriving gradient);
  /// Adds a gradient of a unit that rounds_wanted_with was told of. `finish` sends it: a bucket sent before the last of
  /// them would need a round more than was announced.
  void add_coming(int unit, int parameter, Arriving gradient);
  void set_local(bool local);
  bool is_local() const;

  /// Rounds in which this rank must take part to empty its buckets; sent to the others at a micro-batch's end.
  int64_t rounds_wanted() const;
  /// Likewise, for a rank that adds gradients of these units before `finish`; it sends none of them earlier.
  int64_t rounds_wanted_with(std::vector<bool> coming);
  /// Sends what this rank owes to `rounds` rounds that another rank has begun and waits in, as far as ranks that are
  /// later still allow. For a rank that gets no more gradients before `finish` but those that rounds_wanted_with knows.
  /// Returns whether such a one is what the others wait for.
  bool keep_up(int64_t rounds);
  /// In a backward on a device, before the host waits for work there, which may wait for reductions: serves ranks that
  /// are behind, or have no backward, until all have launched these. Errors: CommError, as of a rank that is lost.
  void before_host_waits() const;
  /// At the end of a backward: on a device, whose work may wait for reductions from now on, this tells ranks that are
  /// behind, or have no backward, what this one has begun, since the program may let the host wait. Never waits itself.
  void end_backward() const;
  /// Says that all has been added that rounds_wanted_with was told of: keep_up sends it.
  void end_coming();
  /// Answers like BucketQueue::advances_alone.
  bool advances_alone() const { return queue_.advances_alone(); }
  /// Goes on with what this rank has sent, unless a thread does so just now. Never waits.
  void go_on();
  /// Collective. Completes `rounds` rounds, the maximum over ranks, and reduces once what is mostly zero; then all
  /// accumulators are final. Without `ends_micro_batch`, has_added still counts what came before.
  void finish(int64_t rounds, bool ends_micro_batch = true);

  bool has_gradient() const { return sums_->has_any(); }
  /// Whether this rank has added a gradient of the parameter in this micro-batch.
  bool has_added(int unit, int parameter) const;
  /// Likewise of any parameter.
  bool has_added_any() const;
  /// Whether this rank has added a gradient of the parameter since they were last dropped or used.
  bool has_seen(int unit, int parameter) const;
  /// For each parameter, unit after unit: 1 if this rank has added a gradient since they were last dropped or used.
  std::vector<uint8_t> seen() const;
  /// Gradient shard (shard,) of a unit, summed or as rows; zeros if none arrived. Valid until it is cleared.
  UnitGradient gradient(int unit) const { return sums_->gradient(unit); }
  /// The next ones: as Sums has them.
  UnitGradient gradient_on_device(int unit) const { return sums_->gradient_on_device(unit); }
  void prefetch(int unit, int64_t element) const { sums_->prefetch(unit, element); }
  bool leave() const { return sums_->leave(); }
  const tiers::Offload* files() const { return sums_->files(); }
  /// While local, after `finish`: this rank's own gradient of the unit (numel,), to be averaged over ranks; zeros if
  /// none arrived. Valid until it is cleared.
  numerics::Contributions local_gradient(int unit);
  /// Answers like sum_of_squares, for this rank's own gradients: its part of the ranks' mean, unit by unit.
  double local_squares();
  /// After `finish`: overwrites elements [begin, begin + values) of the unit's shard of the gradient, which is one of
  /// `parameter` then. All ranks call it, also those that hold no element of it: sums need memory from then on.
  void set_gradient(int unit, int parameter, int64_t begin, const at::Tensor& values);
  /// After `finish`: the parameter's gradient counts as none. All ranks call it.
  void drop_gradient(int unit, int parameter);
  /// Drops what this rank has not sent yet of a parameter's gradients.
  void withhold(int unit, int parameter);
  /// Whether received rows stay unsummed until the step: there is no memory for sums.
  bool keeps_rows() const { return options_.keep_rows; }
  /// Whether those rows live in the buckets (shared memory, or one rank) rather than in receive buffers.
  bool buckets_stay() const { return buckets_stay_; }
  /// The loss by rounding of what this rank sent since the last call, where gradients travel in few bits.
  numerics::QuantizationLoss take_lost();
  /// The errors that rounding has left of this rank's contributions, by position of the unit, (numel,) fp32: to be
  /// saved, or overwritten. Empty: it is not kept. Between steps.
  std::vector<at::Tensor> rounding_errors();
  /// The scale of gradients that arrive from now on. Between steps.
  void set_loss_scale(double loss_scale);
  /// Whether the unit's gradients travel by blocks that are not zero.
  bool is_mostly_zero(int unit) const { return options_.is_mostly_zero(static_cast<size_t>(unit)); }
  /// Memory on this rank.
  ReducerForecast predicted() const;
  /// Sum of squares of all shards of this rank; non-finite if any gradient is. Valid after `finish`. `read`: how what a
  /// device has counted comes to the host; absent: by a wait.
  double sum_of_squares(const FiniteCheck::Read& read = {}) { return sums_->sum_of_squares(read); }
  const std::optional<BadGradient>& bad() const { return local_bad_ ? local_bad_ : sums_->bad(); }
  /// Whether backward gave gradients that are not in the accumulators yet.
  bool has_pending() const;
  /// Drops the accumulated gradients after a step; the local ones too, if they were stepped.
  void clear_accumulated();
  /// While there is no gradient: gives memory of sums and idle buckets back. The next gradients take it anew.
  void release_memory();
  /// Rounds that this rank has begun since the last `finish`; sent to the others before all ranks discard.
  int64_t rounds_begun() const;
  /// Collective. Drops all gradients (zero_grad), after completing `rounds` rounds, the maximum over ranks.
  void discard(int64_t rounds);

 private:
  struct Bucket {
    bool has_any() const { return data.defined() || held != nullptr; }

    at::Tensor data;  // (numel,), of the wire; of sums while local, or once a gradient was added to it
    std::shared_ptr<HeldGradients> held;  // instead, while no gradient was added to another
    std::vector<bool> filled;             // by parameter: `data` holds a gradient
    std::vector<bool> arrived;            // by parameter: arrived in this micro-batch
    int num_arrived = 0;
    std::vector<bool> added;  // by parameter: arrived in this micro-batch, even if the bucket has been sent since
    std::vector<bool> seen;   // by parameter: arrived since the gradients were dropped or used
  };

  void add_to_bucket(Bucket& bucket, const sharding::Unit& unit, int parameter, Arriving& gradient,
                     const std::function<void()>& meanwhile);
  bool hold(Bucket& bucket, const sharding::Unit& unit, int parameter, Arriving& gradient);
  void join(Bucket& bucket, const sharding::Unit& unit, const std::function<void()>& meanwhile);
  void attend() const;
  at::Tensor take(int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile);
  void issue_complete();
  void issue_next(const std::function<void()>& meanwhile = {});
  at::Tensor outgoing(int unit, const std::function<void()>& meanwhile = {});
  const at::Tensor& filled_bucket(int unit);
  void find_local_bad();
  bool complete(int unit) const;
  bool comes(int unit) const;
  bool has_next() const { return next_ < order_.size(); }
  int64_t begun() const;
  void empty(Bucket& bucket);

  std::vector<sharding::Unit*> units_;
  std::unique_ptr<host::Exchange> exchange_;
  int num_ranks_;
  world::WorldRank own_rank_;
  bool shares_memory_;  // with all ranks
  bool buckets_stay_;
  bool holds_;  // gradients themselves, where they may be held
  std::shared_ptr<device::Ledger> ledger_;
  device::BufferPool pool_;
  ReducerOptions options_;
  at::Device device_;

  mutable std::mutex mutex_;
  std::vector<bool> coming_;  // by unit: its gradient is added later, before `finish`
  std::vector<int> order_;    // unit positions, last module first
  std::vector<int> closing_;  // those reduced at the close instead, in the same order
  std::vector<Bucket> buckets_;
  sharding::Residency* const residency_;
  std::unique_ptr<Sums> sums_;  // made as it is used
  BucketQueue queue_;
  int64_t rounds_done_ = 0;  // issued completely, since the last finish
  size_t next_ = 0;          // in order_, for the round under way
  bool local_ = false;
  std::optional<BadGradient> local_bad_;
};

}  // namespace deeptide::gradients
