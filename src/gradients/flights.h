// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reductions under way: the buckets sent, and the sums of what arrived for this rank's shards, in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "device/memory.h"
#include "gradients/finite_check.h"
#include "gradients/hierarchical_sums.h"
#include "gradients/host_sums.h"
#include "gradients/unit_gradient.h"
#include "host/exchange.h"
#include "numerics/ordered_sum.h"
#include "sharding/residency.h"
#include "sharding/unit.h"
#include "tiers/offload.h"

namespace deeptide::gradients {

/// Buckets under way at a time while no rank is late; each has a send and a receive buffer.
inline constexpr size_t kMaxFlights = 2;
/// As kMaxFlights, in shared memory, where nothing is received and ranks may drift further apart.
inline constexpr size_t kMaxOffers = 4;
/// Rounds of buckets that wait for a late peer before this rank waits too. A peer in another branch, or in a collective
/// of the program's own, may depend on this rank: it should not wait at once.
inline constexpr size_t kMaxRoundsAhead = 2;

/// The most flights that accumulate.
size_t most_ahead(size_t num_units, bool shares_memory);

struct ReducerOptions {
  at::ScalarType reduce_dtype = at::kFloat;      // on the wire
  at::ScalarType accumulate_dtype = at::kFloat;  // of sums: of micro-batches in buckets, of ranks in shards
  bool ordered = true;                           // sum by pairs in fp32; false: the transport's own reduction
  /// How many ranks' contributions a host sums before they travel, as summed_together says; 1: each travels. Else
  /// ordered, with an exchange among the ranks of each host.
  int64_t together = 1;
  bool overlap = true;       // start reductions during backward
  bool reserve = true;       // buffers, of which a rank may run out: it then waits. Not on a device, where the order of
                             // calls alone says how many are in use, and where a wait would be one of later work
  bool side_thread = false;  // sum on a separate thread, for cores that would be idle
  bool keep_rows = false;    // until the step, which sums rows as it reads: no memory for sums
  bool accumulates_whole = false;  // several micro-batches are summed in buckets before they travel
  FiniteCheckTime finite_check = FiniteCheckTime::each_sum;  // each step: nothing is read on the host before
  double scale = 1.0;                                        // 1 / (ranks * accumulation), applied to the sum
  std::optional<tiers::OffloadOptions> offload = {};         // of sums, to files; then no rows are kept
  /// By unit: how many of this rank's elements of the sum stay on the device, the first ones; the others leave for the
  /// host's memory as soon as they are summed. Empty: all stay. Not with `offload`, nor with rows that are kept.
  std::vector<int64_t> stays = {};
  std::vector<bool> mostly_zero = {};  // by unit: reduced at the close, by blocks that are not zero; empty: none
  /// Called repeatedly while this rank waits because it is too far ahead, with the rounds that it has begun: it may
  /// serve the others, and inform those that have no more gradients.
  std::function<void(int64_t rounds)> while_ahead;
};

/// Used by one thread. A side thread, if any, sums arrived flights meanwhile, with equal results. An engine's part: in
/// a forked child, which lacks that thread, the engine refuses every call and keeps this alive.
class Flights {
 public:
  /// `units`: by position; each gets an accumulator shard, unless rows are kept. Buckets return to `buckets` once
  /// they may be refilled. `exchange`: null unless all ranks are on one host, or their contributions are summed there.
  Flights(const std::vector<sharding::Unit*>& units, comm::Group& group, host::Exchange* exchange,
          std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options,
          device::BufferPool& buckets);
  ~Flights();

  /// Sends a unit's bucket (numel,), of the wire type. Waits for the earliest flight if too many are under way: at
  /// first briefly, since a peer may be in another branch, and flights then accumulate; with `most_ahead()` of them
  /// until it arrives, and calls `meanwhile` repeatedly. Errors: CommError.
  void launch(int unit, at::Tensor bucket, const std::function<void()>& meanwhile = {});
  size_t most_ahead() const { return gradients::most_ahead(units_.size(), in_place()); }
  /// Sums a unit's bucket at once; blocks of zeros do not travel. Not in shared memory, nor while others are under way.
  /// All ranks call it. Errors: CommError.
  void reduce_mostly_zero(int unit, at::Tensor bucket);
  /// Whether `launch` would not wait for a late peer.
  bool has_room();
  /// Sums arrived flights, without waiting.
  void retire_ready();
  /// Whether what was sent arrives though this rank makes no further call.
  bool advance_alone() const { return !hierarchy_ || side_thread_.joinable(); }
  /// Counts launches, and those of them for which what is next on the caller's lane may wait: their buckets are
  /// refilled.
  sharding::ReductionProgress progress() const { return {launched_, retired_}; }
  /// Waits for all flights and sums them. Errors: CommError.
  void drain();

  /// Until the pool of buckets has one of so many elements that is idle: waits for flights, then for those that read a
  /// bucket of this rank, each time briefly, and calls `meanwhile` repeatedly. If none comes back, the next bucket
  /// takes further memory.
  void make_room(int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile);

  // Valid after `drain`.
  UnitGradient gradient(int unit);
  /// As `gradient`, but where the device is to step what has left: valid until two more are asked for.
  UnitGradient gradient_on_device(int unit);
  /// Announces that the step is about to read this element of the unit's gradient.
  void prefetch(int unit, int64_t element) const;
  /// Null: sums are in memory.
  const tiers::Offload* files() const { return files_ ? &*files_ : nullptr; }
  /// Whether some elements of sums are in the host's memory, which is not the device's.
  bool leave() const { return host_sums_ != nullptr; }
  double sum_of_squares();
  const std::optional<BadGradient>& bad() const { return check_.bad(); }
  bool has_accumulated() const;
  /// Overwrites elements [begin, begin + values) of the unit's sum; whatever was kept as rows is summed first.
  void overwrite(int unit, int64_t begin, const at::Tensor& values);
  void clear_accumulated();
  /// While nothing is accumulated: gives memory of sums back, which later ones take anew.
  void release_memory();

 private:
  struct Flight {
    int unit;
    at::Tensor sent;
    at::Tensor received;  // (world * shard,), or (shard,) from the transport's own reduction; none in shared memory
    bool own_row_stays = false;  // in `sent`
    bool hierarchical = false;   // `received` is the memory of HierarchicalSums, which has the bucket
    device::Mark filled;         // of the lane that filled the bucket
    comm::Pending pending;
    uint32_t offer = 0;  // in shared memory
  };
  /// Summed here, but perhaps not yet by all readers.
  struct Lent {
    at::Tensor sent;
    uint32_t offer;
  };
  class Pause;

  /// Whether rows are summed where the ranks of one host have filled them.
  bool in_place() const { return exchange_ != nullptr && !hierarchy_; }
  size_t pace() const { return in_place() ? kMaxOffers : kMaxFlights; }
  int64_t received_numel(int unit) const;
  at::ScalarType received_dtype() const { return hierarchy_ ? at::kFloat : options_.reduce_dtype; }
  void send(Flight& flight);
  void limit(const std::function<void()>& meanwhile);
  void retire_front(const std::function<void()>& meanwhile = {});
  bool retire_soon(const std::function<void()>& meanwhile);
  bool reclaim_soon(const std::function<void()>& meanwhile);
  void make_room(device::BufferPool& pool, int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile);
  void reclaim();
  void sum(Flight& flight);
  void keep(Flight& flight);
  void accumulate_kept();
  void add(Flight& flight);
  using Visit = std::function<void(tiers::Block block, const at::Tensor& sum)>;
  void change(int unit, bool first, const Visit& visit);
  bool leaves(int unit) const { return host_sums_ && host_sums_->has(unit); }
  const tiers::Buffer& accumulator(int unit);
  numerics::Contributions contributions(const Flight& flight) const;
  void give_back(Flight& flight);
  void lend(at::Tensor bucket, uint32_t offer);
  void go_on();
  comm::Site site(int unit, const char* phase = "backward") const;
  void run_side_thread();
  void order_before_frees();

  std::vector<sharding::Unit*> units_;
  comm::Group& group_;
  host::Exchange* exchange_;
  device::BufferPool& buckets_;
  at::Device device_;
  device::Lane send_lane_;  // a bucket leaves once it is full and there is a buffer for what arrives
  device::Lane sum_lane_;   // what has arrived is summed, while the current lane goes on
  device::BufferPool receive_pool_;
  ReducerOptions options_;

  std::shared_ptr<device::Ledger> ledger_;
  std::optional<tiers::Offload> files_;
  std::vector<tiers::Buffer> accumulators_;  // but for those that leave
  std::unique_ptr<HostSums> host_sums_;      // null: none leaves
  std::vector<Flight> kept_;                 // arrived, not summed; ordered as offered
  std::vector<int> kept_at_;                 // by unit: its index in kept_, or -1
  std::vector<bool> accumulated_;            // by unit: holds something since the last clear
  at::Tensor sums_of_squares_;               // (units,), fp64
  FiniteCheck check_;
  std::unique_ptr<HierarchicalSums> hierarchy_;  // null: each rank's contributions travel, or none does
  std::atomic<int64_t> launched_{0}, retired_{0};
  bool peers_elsewhere_ = false;    // a wait for the front flight was to no avail
  bool readers_elsewhere_ = false;  // likewise for the readers of what was lent first

  // The queue is shared with the side thread, which takes only the front. One thread at a time uses the rest.
  std::deque<Flight> queue_;
  std::deque<Lent> lent_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool side_is_busy_ = false;
  bool side_may_work_ = true;
  bool stop_ = false;
  std::exception_ptr side_failure_;  // its sum is half done: no thread may go on
  std::thread side_thread_;
};

}  // namespace deeptide::gradients
