// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets what a step publishes arrive while the program goes on: whoever touches a parameter waits for its unit.
#pragma once

#include <unistd.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/background_gathers.h"
#include "comm/group.h"
#include "sharding/gate.h"
#include "sharding/unit.h"

namespace deeptide::zero {

/// Whole units whose new values are on their way to all ranks. Their parameters carry the gate's key, so every operator
/// that receives one waits for its unit and for those started before; what bypasses operators throws our text
/// meanwhile. All gathers are started within the step, so no rank waits for another's program. Thread-safe.
class Arrivals : public sharding::Gatekeeper {
 public:
  /// `units`: whole on each rank. `group`: carries nothing else until `wait_all` has returned.
  Arrivals(std::vector<sharding::Unit*> units, comm::Group& group, at::Device device);
  /// Waits; a failure becomes a warning.
  ~Arrivals() override;

  /// Starts to gather a unit whose shard has its new values. All ranks start equal units in one order, none twice
  /// before `wait_all`.
  void start(sharding::Unit& unit);
  /// Returns when every unit has its new values. Errors: CommError naming the first unit that has not arrived; whoever
  /// needs that unit later gets it again.
  void wait_all();

  void acquire(c10::ArrayRef<sharding::Use> uses) override;
  void release(c10::ArrayRef<sharding::Use>, bool) override {}
  bool lends() const override { return false; }

  /// Bytes that this rank has sent to the others so far.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Arrival {
    sharding::Unit* unit;
    comm::Pending pending;
  };

  comm::Pending gather(const sharding::Unit& unit);
  void land_first(const char* phase);

  std::vector<sharding::Unit*> units_;
  comm::Group& group_;
  const at::Device device_;
  const pid_t process_ = ::getpid();
  std::vector<sharding::GateEntry> entries_;

  std::mutex mutex_;
  std::unique_ptr<comm::BackgroundGathers> helper_;  // null: the group advances alone
  std::deque<Arrival> under_way_;
  std::optional<sharding::Watch> watch_;  // while some are under way
  int64_t sent_bytes_ = 0;
};

}  // namespace deeptide::zero
