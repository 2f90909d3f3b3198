// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// All-gathers of whole units, several under way at a time, so that links do not idle between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "comm/team_groups.h"
#include "sharding/residency.h"
#include "sharding/unit.h"

namespace deeptide::zero {

class Arrivals;

/// No more all-gathers are started while these are under way. At 1 Gbit/s they take 130 ms, at 100 Gbit/s 1.3 ms: a
/// rank that computes meanwhile returns before the link idles.
inline constexpr int64_t kBytesUnderWay = 16 << 20;

/// Starts in one order on all ranks, and ends in that order. Used by one thread.
class UnitGathers {
 public:
  /// `verb`: "publishing", for errors.
  UnitGathers(comm::Group& group, const char* verb) : group_(group), verb_(verb) {}
  /// On a device, what is under way after an error ends before the memory of its output is used again.
  ~UnitGathers();
  UnitGathers(const UnitGathers&) = delete;
  UnitGathers& operator=(const UnitGathers&) = delete;

  bool has_room() const { return bytes_ < kBytesUnderWay; }
  /// `unit`: its name, for errors; `over`: null: the constructor's group. Shapes: input (N,), output (W * N,).
  void start(const std::string& unit, at::Tensor output, at::Tensor input, comm::OwnRow own = comm::OwnRow::copied,
             comm::Group* over = nullptr);
  /// Queues an output that is there already.
  void add_done(at::Tensor output);
  /// Waits for the first that is under way, and returns its output. Errors: CommError.
  at::Tensor wait_first();
  /// Errors: CommError.
  void wait_all();

 private:
  struct Gather {
    std::string unit;
    at::Tensor output;
    at::Tensor input;  // perhaps nobody else's
    comm::Pending pending;
    comm::Group* group;
  };

  comm::Group& group_;
  const char* verb_;
  std::deque<Gather> under_way_;
  int64_t bytes_ = 0;  // of the outputs under way
};

/// Brings stepped shards to all ranks, unit by unit, while others are stepped. All ranks add the same units in one
/// order. Sharded units are gathered by their residency; what lies in shared memory is published by one barrier at the
/// end.
class Publication {
 public:
  /// `arrivals`: takes over units that are gathered; null: `finish` waits for them. `residency`: is told of sharded
  /// units; may be null.
  explicit Publication(comm::TeamGroups over, Arrivals* arrivals = nullptr, sharding::Residency* residency = nullptr)
      : over_(std::move(over)), arrivals_(arrivals), residency_(residency), gathers_(over_.whole(), "publishing") {}
  /// Call it when the unit's shard has its new values. Errors: CommError.
  void add(sharding::Unit& unit);
  /// Returns when all units have the new values, but those that others took over. Errors: CommError.
  void finish();

 private:
  comm::TeamGroups over_;
  Arrivals* arrivals_;
  sharding::Residency* residency_;
  UnitGathers gathers_;
  bool shared_ = false;
};

}  // namespace deeptide::zero
