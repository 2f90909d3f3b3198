// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How a unit's bucket reaches the ranks that own its parts: one interface, one file per way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/team_groups.h"
#include "device/lane.h"
#include "device/memory/memory.h"
#include "gradients/route/lent_buckets.h"
#include "host/exchange.h"
#include "numerics/rounding/quantized.h"
#include "sharding/unit.h"

namespace deeptide::gradients {

class HeldGradients;
class Route;

/// The error that rounding has left of this rank's contributions, per unit: added to the next one.
struct RoundingErrors {
  std::vector<at::Tensor> of_units;  // by position: (numel,) fp32, of gradients without the loss scale
  double loss_scale = 1.0;           // of the gradients that arrive now
};

/// A bucket on its way to the owners of its rows; once it has arrived, what all ranks have for this one.
struct Shipment {
  int unit = 0;  // by position
  Route* route = nullptr;
  at::Tensor bucket;                          // this rank's; undefined: the route keeps it, or it may be refilled
  at::Tensor arrived;                         // undefined: rows lie in buckets
  std::shared_ptr<const HeldGradients> held;  // instead of a bucket
  uint32_t offer = 0;                         // in shared memory
  comm::Pending pending;
  device::Mark filled;  // of the lane that filled the bucket
};

/// The facts that decide by which way buckets travel, known without ranks.
struct RouteFacts {
  int num_ranks = 1;
  bool shares_memory = false;  // all ranks read each other's buckets in place
  bool ordered = true;         // sums are by pairs in fp32; false: the transport's own
  int64_t together = 1;        // ranks of a host whose contributions are summed before they travel; 1: each travels
  bool keeps_rows = false;     // what arrives stays until the step
  at::ScalarType dtype = at::kFloat;  // of buckets
  int bits = 0;                       // of an element that travels, in fp32 buckets; 0: it travels whole
  bool feedback = false;              // rounding errors are added to the next contribution; with `bits`

  /// Whether a rank keeps an error per element.
  bool keeps_errors() const { return feedback && bits > 0 && num_ranks > 1; }
};

/// The memory of a way, known without ranks.
struct RouteForecast {
  int64_t arriving_numel(const sharding::UnitLayout& unit) const {
    if (bits == 0) return unit.numel * unit.copies * arriving / of;
    const int64_t rows = unit.shard == 0 ? 0 : unit.numel / unit.shard * unit.copies;
    return rows * arriving / of * numerics::quantized_bytes(unit.shard, bits);
  }
  int64_t arriving_bytes(const sharding::UnitLayout& unit) const {
    return arriving_numel(unit) * static_cast<int64_t>(c10::elementSize(dtype));
  }

  size_t pace = 2;               // buckets under way at a time while no rank is late; each has memory of what arrives
  size_t lent = 0;               // buckets beside those that a neighbour may not have read yet
  int64_t arriving = 0, of = 1;  // elements that arrive for so many of the unit's; 0: rows lie in buckets
  at::ScalarType dtype = at::kFloat;  // of what arrives
  int bits = 0;                       // of an element of it, which are bytes then; 0: it has the dtype
};
RouteForecast forecast(const RouteFacts& facts);

/// An element that is not finite, seen by a rank that summed it for others.
struct BadElement {
  int unit;         // by position
  int64_t element;  // of the unit
  /// Whose contribution is bad; none: each is finite, their sum is not.
  world::TeamIndex row;
};

/// All ranks start the same units in one order. Used by one thread at a time, but `start`, which may run beside the
/// other functions.
class Route {
 public:
  /// The parts that routes use. They outlive them.
  struct Parts {
    const std::vector<sharding::Unit*>& units;
    comm::TeamGroups groups;      // over which the units' gradients are reduced
    host::Exchange* exchange;     // of the ranks of this host; null: none
    device::BufferPool& buckets;  // take them back
    device::BufferPool& arrivals;
    RoundingErrors* errors = nullptr;  // null: what rounding takes is lost
  };

  Route(const Parts& parts, const RouteFacts& facts)
      : parts_(parts), facts_(facts), forecast_(gradients::forecast(facts)) {}
  virtual ~Route() = default;
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;

  const RouteForecast& forecast() const { return forecast_; }
  /// Over all ranks; the other one over those that reduce the unit.
  comm::Group& group() const { return parts_.groups.whole(); }
  comm::Group& group(const Shipment& shipment) const { return parts_.groups.of(unit(shipment).reduce_over()); }

  /// Sends the shipment's bucket (numel,), on the current lane. Never waits. Errors: CommError.
  virtual void start(Shipment& shipment) = 0;
  /// Goes on with what was started, never waits.
  virtual void go_on() {}
  /// Whether what was started arrives though this rank makes no further call.
  virtual bool advances_alone() const { return true; }

  // Once the shipment has arrived.
  /// Lets the bucket be refilled, unless rows lie in it.
  virtual void arrive(Shipment&) {}
  /// The addends of this rank's shard, (shard,) each.
  virtual std::vector<at::Tensor> rows(const Shipment& shipment) const = 0;
  /// Whose contribution a row is, of the ranks that reduce the unit; none: of several.
  virtual world::TeamIndex sender(int row) const { return world::TeamIndex(row); }
  /// Elements that were not finite where this rank summed for others, since the last call.
  virtual std::vector<BadElement> take_bad() { return {}; }
  /// The loss by rounding of what this rank sent, since the last call. Not beside `start`.
  virtual numerics::QuantizationLoss take_lost() { return {}; }
  /// The rows have been used.
  virtual void end(Shipment& shipment);
  /// Buckets that other ranks still read; null: there are none such.
  virtual LentBuckets* lent() { return nullptr; }

 protected:
  sharding::Unit& unit(const Shipment& shipment) const { return *parts_.units[shipment.unit]; }
  /// Takes memory for what arrives.
  void take_arrival(Shipment& shipment) const;

  const Parts parts_;
  const RouteFacts facts_;
  const RouteForecast forecast_;
};

/// The place of an error while a unit's gradients are reduced.
comm::Site reduction_site(const sharding::Unit& unit, const char* phase = "backward");

/// Chooses the way that the facts decide.
std::unique_ptr<Route> make_route(const Route::Parts& parts, const RouteFacts& facts);

// The ways. Each states what it takes in a function of its own.

/// The ranks of one host read each other's buckets where they lie.
std::unique_ptr<Route> make_shared_memory_route(const Route::Parts& parts, const RouteFacts& facts);
RouteForecast forecast_shared_memory(const RouteFacts& facts);

/// Every rank's row travels to its owner, who sums them in the order of ranks. For one rank, nothing travels.
std::unique_ptr<Route> make_all_to_all_route(const Route::Parts& parts, const RouteFacts& facts);
RouteForecast forecast_all_to_all(const RouteFacts& facts);

/// Ranks of one host sum what they contribute, and only their sums travel.
std::unique_ptr<Route> make_two_level_route(const Route::Parts& parts, const RouteFacts& facts);
RouteForecast forecast_two_levels(const RouteFacts& facts);

/// The transport sums, in an order and a type of its choice.
std::unique_ptr<Route> make_transport_route(const Route::Parts& parts, const RouteFacts& facts);
RouteForecast forecast_transport(const RouteFacts& facts);

/// Sends all-to-all, in whole numbers of 8 or 4 bits and a scale per block. On the CPU.
std::unique_ptr<Route> make_quantized_route(const Route::Parts& parts, const RouteFacts& facts);
RouteForecast forecast_quantized(const RouteFacts& facts);

/// Sends all-to-all without blocks of zeros, which stay behind: `start` is collective, returns when all is there. Not
/// in shared memory.
std::unique_ptr<Route> make_nonzero_route(const Route::Parts& parts, const RouteFacts& facts);

/// How many neighbours' contributions of `dtype` travel as one, in fp32: the largest power of two that divides a host's
/// ranks, so that sums by pairs keep their bits. 1 where that saves no bytes.
int64_t summed_together(int64_t ranks_per_host, at::ScalarType dtype);

}  // namespace deeptide::gradients
