// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides which sharded units are whole: gathers them before an operator and releases them afterwards, within a budget,
// in an agreed order.
#pragma once

#include <c10/util/ArrayRef.h>

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous.h"
#include "sharding/gate.h"
#include "sharding/pending_writes.h"
#include "sharding/plan.h"
#include "sharding/unit.h"

namespace deeptide::sharding {

/// Units: elements.
struct ResidencyLimits {
  int64_t max_live = 0;            // gathered at once; raised to the size of the two largest units if smaller
  int64_t prefetch = 0;            // requested ahead of need
  int64_t max_reuse_distance = 0;  // a unit whose next use is farther away is released at once
  int64_t read_ahead_bytes = 0;    // of shards in files, announced ahead of their gathers
};

/// How far this rank's reductions are, in the order in which all ranks begin them.
struct ReductionProgress {
  int64_t launched = 0;
  int64_t awaited = 0;  // work that this rank issues from now on may wait for so many of them
};

/// A kept buffer serves a unit of its own size only.
inline constexpr int64_t kGatheredWaste = 1;

/// Elements of the two largest units: what is gathered while one is used.
int64_t two_largest(const std::vector<const UnitLayout*>& units);

/// Memory of what is gathered, of sharded units, if operators use them in module order. Units: bytes.
int64_t forecast(const std::vector<const UnitLayout*>& units, ResidencyLimits limits);

/// Serves the gate of one engine. Issues gathers in rounds: every rank states what it needs and what it would like
/// next. All ranks then issue, in one order, every unit that any rank needs and those that all ranks would like. So all
/// ranks share one order of collectives, whatever branches they take. Thread-safe.
class Residency : public Gatekeeper {
 public:
  Residency(std::vector<Unit*> units, comm::Group& gathers, comm::Group& control,
            std::shared_ptr<device::Ledger> ledger, at::Device device, const ResidencyLimits& limits);
  ~Residency() override;

  /// For a device, whose work may wait for other ranks: gathers that such ranks need must not wait for it.
  void follow(std::function<ReductionProgress()> reductions) { reductions_ = std::move(reductions); }

  /// Makes the units of `uses` whole and opens their parameters. Errors: CommError, with nothing pinned.
  void acquire(c10::ArrayRef<Use> uses) override;
  /// Closes the parameters. What was written enters the shards once all ranks have written it, or have closed.
  void release(c10::ArrayRef<Use> uses, bool succeeded) override;
  bool lends() const override { return true; }

  /// Collective. Posts `own` in every round, and serves ranks that still need units, until all ranks close. Then every
  /// shard has what its rank wrote. Returns each rank's message in the team's order. `ends_pass`: the plan learns which
  /// units the pass has used. `keep_up` is called between rounds with the most reductions that a rank has begun and
  /// announced, `meanwhile` every few milliseconds.
  using KeepUp = std::function<void(int64_t rounds)>;
  std::vector<comm::Close> close(const comm::Close& own, bool ends_pass, const KeepUp& keep_up = {},
                                 const std::function<void()>& meanwhile = {});
  /// Serves the others while this rank waits for their reductions: call it over and over. Announces that this rank has
  /// begun `rounds` reductions. Waits for gathers that are due, never for a rank that is not in a round.
  void attend(int64_t rounds);
  /// Collective, among ranks that have all closed: every rank receives every rank's message.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const comm::Site& site) {
    std::lock_guard lock(mutex_);
    return rendezvous_.exchange(own, site);
  }
  /// The same for `bytes` bytes, equally many on all ranks; `all` takes those of every rank in the team's order.
  void exchange_bytes(const void* own, void* all, size_t bytes, const comm::Site& site) {
    std::lock_guard lock(mutex_);
    rendezvous_.exchange_bytes(own, all, bytes, site);
  }
  /// Leaves no unit whole: call it when shards have changed or memory is wanted, after all ranks have closed.
  void release_all();
  /// Collective, after all ranks have closed a pass: begins a step that changes all shards. Leaves no unit whole.
  void begin_step();
  /// Within such a step: this unit's shard has its new values. If all ranks expect to begin the next pass with it, its
  /// gather starts, so that it arrives while the others are stepped. All ranks call it for equal units in one order.
  void note_stepped(Unit& unit);
  /// All shards have their new values.
  void end_step();

  int64_t live_bytes() const;
  int64_t peak_bytes() const;
  int64_t budget() const { return limits_.max_live; }
  /// As `forecast`. Models that use units in another order may take up to `budget()` elements; an operator that uses
  /// more by itself, or a rank that writes parameters which others do not, takes what it needs.
  int64_t predicted_bytes() const;
  int64_t rounds() const { return rendezvous_.rounds(); }
  int64_t gathers_issued() const { return gathers_issued_; }

 private:
  struct Flight {
    Unit* unit;
    at::Tensor buffer;
    comm::Pending pending;
    device::Mark issued;  // a single rank's gather is the copy of its own shard
    bool keep;            // false: gathered for another rank only
  };

  void acquire_locked(c10::ArrayRef<Use> uses);
  void release_locked(c10::ArrayRef<Use> uses, bool succeeded);
  void visit(const Unit& unit);
  void bring(const std::vector<Unit*>& needed);
  void look_ahead();
  void read_ahead() const;
  void post(comm::Word word);
  ReductionProgress reductions() const { return reductions_ ? reductions_() : ReductionProgress(); }
  comm::Wishes request(const std::vector<Unit*>& needed) const;
  void add_wishes(comm::Wishes& word, const std::vector<Unit*>& needed) const;
  void serve(const std::vector<comm::Word>& words);
  void commit_writes(const std::vector<comm::Word>& words);
  bool end_close(const std::vector<comm::Word>& words, bool ends_pass);
  void list_ahead(comm::Close& word) const;
  std::vector<comm::Word> collect(const comm::Site& site, const std::function<void()>& meanwhile = {});
  void advance_flights();
  void launch(Unit& unit, bool keep);
  void order_gathers_after_shards();
  bool in_flight(const Unit& unit) const;
  void land_front();
  void land_all();
  void make_room(int64_t numel);
  Unit* choose_victim() const;
  void let_go(Unit& unit);
  void let_go_of_all();
  void trim();
  void order_before_frees();
  bool may_go(const Unit& unit) const;
  void count(const Unit& unit, int sign);
  Plan& plan() const;
  comm::Site site(const char* verb, const Unit& unit) const;

  std::vector<Unit*> units_;  // by Unit::index(); null: kept whole
  comm::Group& gathers_;
  comm::Rendezvous rendezvous_;
  at::Device device_;
  device::Lane gather_lane_;    // whole units arrive on it, while the current lane computes
  bool shards_changed_ = true;  // perhaps, since the gather lane was last put behind the current one
  device::BufferPool pool_;
  std::function<ReductionProgress()> reductions_;  // null: no work waits for them
  int64_t launched_by_all_ = 0;                    // as far as this rank knows
  ResidencyLimits limits_;
  std::vector<GateEntry> entries_;
  std::optional<Watch> watch_;  // nothing: no unit is sharded

  mutable std::mutex mutex_;
  mutable Plan train_plan_;
  mutable Plan eval_plan_;
  std::deque<Flight> flights_;
  PendingWrites pending_writes_;
  std::vector<Unit*> needed_;  // of the acquire in progress: must not be released
  std::vector<int> ahead_;     // gathered as soon as they are stepped: all ranks begin the next pass with them
  std::vector<int64_t> last_use_;
  int64_t clock_ = 0;
  int last_visited_ = -1;
  int64_t live_numel_ = 0;  // whole or in flight
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t predicted_bytes_ = 0;
  std::atomic<int64_t> gathers_issued_{0};
};

}  // namespace deeptide::sharding
