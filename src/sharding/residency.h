// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which sharded units are whole: brings them in before an operator, lets them go again, within a budget, in an agreed
// order.
#pragma once

#include <c10/util/ArrayRef.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "comm/rendezvous.h"
#include "sharding/gate.h"
#include "sharding/plan.h"
#include "sharding/unit.h"

namespace deeptide::sharding {

/// One parameter of an operator in flight.
struct Use {
  Parameter* parameter = nullptr;
  Residency* residency = nullptr;
  bool write = false;
};

/// Units: elements.
struct ResidencyLimits {
  int64_t max_live = 0;            // gathered at once; raised to the two largest units when below
  int64_t prefetch = 0;            // asked for ahead of need
  int64_t max_reuse_distance = 0;  // a unit whose next use is farther away goes at once
};

/// Serves the gate of one engine. Gathers are issued round by round: in a round every rank says what it needs and what
/// it would like next; all ranks then issue every unit that anyone needs, and those that everyone would like, in the
/// same order. So the order of collectives is one, whatever branches the ranks take. Thread-safe.
class Residency {
 public:
  Residency(std::vector<Unit*> units, comm::Group& gathers, comm::Group& control,
            std::shared_ptr<device::Ledger> ledger, at::Device device, const ResidencyLimits& limits);
  ~Residency();
  Residency(const Residency&) = delete;

  /// Makes the uses' units whole and opens their parameters. Errors: CommError; nothing is pinned then.
  void acquire(c10::ArrayRef<Use> uses);
  /// Closes them; what was written comes into the shards.
  void release(c10::ArrayRef<Use> uses, bool succeeded);

  /// Collective. Posts `own` in round after round, serving the ranks that still need units, until all ranks close.
  /// Returns what each rank said, in the team's order. `ends_pass`: the plan learns which units the pass has used.
  std::vector<comm::Close> close(const comm::Close& own, bool ends_pass);
  /// Collective, among ranks that have all closed: every rank hears every rank's message.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const comm::Site& site) {
    std::lock_guard lock(mutex_);
    return rendezvous_.exchange(own, site);
  }
  /// Shards have changed or memory is wanted: no unit is whole afterwards. Call it when all ranks have closed.
  void release_all();

  int64_t id() const { return id_; }
  int64_t live_bytes() const;
  int64_t peak_bytes() const;
  int64_t budget() const { return limits_.max_live; }
  /// What gathered units take at most on this rank, unless one operator uses more.
  int64_t predicted_bytes() const;
  int64_t rounds() const { return rendezvous_.rounds(); }
  int64_t gathers_issued() const { return gathers_issued_; }

 private:
  struct Flight {
    Unit* unit;
    at::Tensor buffer;
    comm::Pending pending;
    bool keep;  // false: served for another rank
  };

  void acquire_locked(c10::ArrayRef<Use> uses);
  void release_locked(c10::ArrayRef<Use> uses, bool succeeded);
  void visit(const Unit& unit);
  void bring(const std::vector<Unit*>& needed);
  void look_ahead();
  comm::Wishes request(const std::vector<Unit*>& needed) const;
  void add_wishes(comm::Wishes& word, const std::vector<Unit*>& needed) const;
  void serve(const std::vector<comm::Word>& words);
  void launch(Unit& unit, bool keep);
  bool in_flight(const Unit& unit) const;
  void land_front();
  void land_all();
  void make_room(int64_t numel);
  Unit* choose_victim() const;
  void let_go(Unit& unit);
  void count(const Unit& unit, int sign);
  Plan& plan() const;
  comm::Site site(const char* verb, const Unit& unit) const;

  const int64_t id_;
  std::vector<Unit*> units_;  // by Unit::index(); null: kept whole
  comm::Group& gathers_;
  comm::Rendezvous rendezvous_;
  at::Device device_;
  device::BufferPool pool_;
  ResidencyLimits limits_;
  std::vector<GateEntry> entries_;

  mutable std::mutex mutex_;
  mutable Plan train_plan_;
  mutable Plan eval_plan_;
  std::deque<Flight> flights_;
  std::vector<Unit*> needed_;  // of the acquire in progress: not to be let go
  std::vector<int64_t> last_use_;
  int64_t clock_ = 0;
  int last_visited_ = -1;
  int64_t live_numel_ = 0;  // whole or in flight
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  std::atomic<int64_t> gathers_issued_{0};
};

}  // namespace deeptide::sharding
