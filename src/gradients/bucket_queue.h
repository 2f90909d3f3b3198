// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buckets under way: sent in order, summed in that order as they arrive. Says when a rank that is ahead waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/rounds.h"
#include "device/memory/memory.h"
#include "gradients/reducer_options.h"
#include "gradients/route/route.h"
#include "gradients/sums.h"

namespace deeptide::gradients {

/// Used by one thread. A side thread, if any, sums what has arrived meanwhile, with equal results. An engine's part: in
/// a forked child, which lacks that thread, the engine refuses every call and keeps this alive.
class BucketQueue {
 public:
  /// Buckets return to `buckets` once they may be refilled; what arrives goes into `sums`. `rounds`: learns how far
  /// reductions are; null: nobody asks.
  BucketQueue(const std::vector<sharding::Unit*>& units, comm::TeamGroups groups, host::Exchange* exchange,
              const std::shared_ptr<device::Ledger>& ledger, at::Device device, const ReducerOptions& options,
              device::BufferPool& buckets, Sums& sums, comm::Rounds* rounds);
  ~BucketQueue();
  BucketQueue(const BucketQueue&) = delete;

  /// Sends a unit's bucket (numel,), of the wire type. Waits for the earliest shipment if too many are under way: at
  /// first briefly, since a peer may be in another branch, and they then accumulate; with `most_ahead()` of them until
  /// it arrives, and calls `meanwhile` repeatedly. `held`: instead of a bucket, where nothing travels. Errors:
  /// CommError.
  void launch(int unit, at::Tensor bucket, const std::function<void()>& meanwhile = {},
              std::shared_ptr<const HeldGradients> held = {});
  /// Sums a unit's bucket at once; blocks of zeros do not travel. Not in shared memory, nor while others are under way.
  /// All ranks call it. Errors: CommError.
  void reduce_mostly_zero(int unit, at::Tensor bucket);
  /// Whether `launch` would not wait for a late peer.
  bool has_room();
  /// Sums what has arrived, without waiting.
  void retire_ready();
  /// Whether what was sent arrives though this rank makes no further call.
  bool advances_alone() const { return route_->advances_alone() || side_thread_.joinable(); }
  /// Returns Route::take_lost.
  numerics::QuantizationLoss take_lost() { return route_->take_lost(); }
  /// The errors of this rank's contributions; none: they are lost. While nothing is under way.
  RoundingErrors& rounding_errors() { return errors_; }
  /// Waits for all and sums them. Errors: CommError.
  void drain();
  /// While nothing is under way: gives idle memory back.
  void release_memory() { arrivals_.trim(); }

  /// Until the pool of buckets has one of so many elements that is idle: waits for shipments, then for those that read
  /// a bucket of this rank, each time briefly, and calls `meanwhile` repeatedly. If none comes back, the next bucket
  /// takes further memory.
  void make_room(int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile);

 private:
  class Pause;

  size_t most_ahead() const;
  void limit(const std::function<void()>& meanwhile);
  void retire_front(const std::function<void()>& meanwhile = {});
  bool retire_soon(const std::function<void()>& meanwhile);
  bool reclaim_soon(const std::function<void()>& meanwhile);
  void make_room(device::BufferPool& pool, int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile);
  comm::Group& group_of(const Shipment& shipment) const { return groups_.of(units_[shipment.unit]->reduce_over()); }
  comm::Site site(const Shipment& shipment) const { return reduction_site(*units_[shipment.unit]); }
  void tell_progress() const;
  void run_side_thread();
  void order_before_frees();

  const std::vector<sharding::Unit*> units_;
  const bool reserves_;
  const at::Device device_;
  const comm::TeamGroups groups_;
  device::Lane send_lane_;  // a bucket leaves once it is full and there is a buffer for what arrives
  device::Lane sum_lane_;   // what has arrived is summed, while the current lane goes on
  device::BufferPool& buckets_;
  device::BufferPool arrivals_;
  Sums& sums_;
  RoundingErrors errors_;
  std::unique_ptr<Route> route_;
  std::unique_ptr<Route> nonzero_route_;  // null: no unit is mostly zero
  comm::Rounds* const rounds_;            // null: no work waits for reductions
  int64_t launched_ = 0;
  int64_t retired_ = 0;  // of those: what is next on the caller's lane may wait for them, since buckets are refilled
  bool peers_elsewhere_ = false;    // a wait for the front was to no avail
  bool readers_elsewhere_ = false;  // likewise for the readers of what was lent first

  // The queue is shared with the side thread, which takes only the front. One thread at a time uses the rest.
  std::deque<Shipment> queue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool side_is_busy_ = false;
  bool side_may_work_ = true;
  bool stop_ = false;
  std::exception_ptr side_failure_;  // its sum is half done: no thread may go on
  std::thread side_thread_;
};

}  // namespace deeptide::gradients
