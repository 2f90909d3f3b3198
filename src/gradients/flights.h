// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reductions under way: buckets that were sent, and the sums of what came into this rank's shards, in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "device/memory.h"
#include "host/exchange.h"
#include "numerics/ordered_sum.h"
#include "sharding/unit.h"

namespace deeptide::gradients {

/// Buckets under way at a time while every rank keeps pace; each has what it sends and what it receives.
inline constexpr size_t kMaxFlights = 2;
/// The same in shared memory, where nothing is received; ranks need not keep step so closely there.
inline constexpr size_t kMaxOffers = 4;

struct ReducerOptions {
  at::ScalarType reduce_dtype = at::kFloat;  // on the wire
  bool ordered = true;                       // sum in rank order in fp32; false: the transport's own reduction
  bool overlap = true;                       // start reductions during backward
  bool side_thread = false;                  // sum on a thread of its own, for cores that would be idle
  bool keep_rows = false;                    // until the step, which sums them as it reads: no memory for sums
  bool accumulates_whole = false;            // several micro-batches meet in fp32 buckets before they travel
  double scale = 1.0;                        // 1 / (ranks * accumulation), applied to the sum
};

/// A gradient that is not finite.
struct BadGradient {
  int unit = 0;       // Unit::index()
  int parameter = 0;  // in that unit
  int rank = -1;      // that contributed it, by index in the team; -1: every contribution was finite, the sum was not
};

/// Used by one thread; the side thread, if there is one, sums what has arrived meanwhile, with the same results.
class Flights {
 public:
  /// `units`: by position; an fp32 accumulator shard each, unless rows are kept. Buckets go back to `buckets` when they
  /// may be filled again. `exchange`: when all ranks are on one host; null otherwise.
  Flights(const std::vector<sharding::Unit*>& units, comm::Group& group, host::Exchange* exchange,
          std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options,
          device::BufferPool& buckets);
  ~Flights();

  /// Sends a unit's bucket (numel,), of the type that travels. Waits for the earliest first while there are too many,
  /// but not long: a peer may be elsewhere, and then they pile up.
  void launch(int unit, at::Tensor bucket);
  /// Sums what has arrived, without waiting.
  void retire_ready();
  /// Waits for all and sums them. Errors: CommError.
  void drain();

  /// Buckets that all ranks have read may be filled again.
  void reclaim();

  // Valid after `drain`.
  numerics::Contributions gradient(int unit);
  double sum_of_squares() const;
  const std::optional<BadGradient>& bad() const { return bad_; }
  bool has_accumulated() const;
  void clear_accumulated();

 private:
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
  class Pause;

  void limit();
  void retire_front();
  void sum(Flight& flight);
  void keep(Flight& flight);
  void accumulate_kept();
  void add(Flight& flight);
  at::Tensor& accumulator(int unit);
  numerics::Contributions contributions(const Flight& flight) const;
  void give_back(Flight& flight);
  void look_for_bad(int unit, const numerics::Contributions& contributions, const at::Tensor& sum);
  comm::Site site(int unit) const;
  void run_side_thread();

  std::vector<sharding::Unit*> units_;
  comm::Group& group_;
  host::Exchange* exchange_;
  device::BufferPool& buckets_;
  device::BufferPool receive_pool_;
  ReducerOptions options_;

  std::shared_ptr<device::Ledger> ledger_;
  at::Device device_;
  std::vector<at::Tensor> accumulators_;
  std::vector<Flight> kept_;       // arrived, not summed; in the order of their offers
  std::vector<int> kept_at_;       // by unit: its index there, or -1
  std::vector<bool> accumulated_;  // by unit: holds something since the last clear
  at::Tensor sums_of_squares_;     // (units,), fp64
  std::optional<BadGradient> bad_;
  bool peers_elsewhere_ = false;  // the flight in front was waited for in vain

  // The queue is shared with the side thread, which takes the front only; all else is whoever's turn it is.
  std::deque<Flight> queue_;
  std::deque<Lent> lent_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool side_is_busy_ = false;
  bool side_may_work_ = false;
  bool stop_ = false;
  std::thread side_thread_;
};

}  // namespace deeptide::gradients
