// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides which sharded units are whole: gathers them before an operator and releases them afterwards, within a budget,
// in an agreed order.
#pragma once

#include <c10/util/ArrayRef.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/rounds.h"
#include "comm/team_groups.h"
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

/// A kept buffer serves a unit of its own size only.
inline constexpr int64_t kGatheredWaste = 1;

/// Elements of the two largest units: what is gathered while one is used.
int64_t two_largest(const std::vector<const UnitLayout*>& units);

/// Memory of what is gathered, of sharded units, if operators use them in module order. Units: bytes.
int64_t forecast(const std::vector<const UnitLayout*>& units, ResidencyLimits limits);
/// By unit, how often a step of `passes` forwards and backwards gathers it, in the same order.
std::vector<int64_t> forecast_gathers(const std::vector<const UnitLayout*>& units, ResidencyLimits limits,
                                      int64_t passes);

/// Serves the gate of one engine. Issues gathers in rounds: every rank states what it needs and what it would like
/// next. All ranks then issue, in one order, every unit that any rank needs and those that all ranks would like. So all
/// ranks share one order of collectives, whatever branches they take. Thread-safe.
class Residency : public Gatekeeper {
 public:
  Residency(std::vector<Unit*> units, comm::TeamGroups gathers, comm::Rounds& rounds,
            std::shared_ptr<device::Ledger> ledger, at::Device device, const ResidencyLimits& limits);
  ~Residency() override;

  /// Makes the units of `uses` whole and opens their parameters. Errors: CommError, with nothing pinned.
  void acquire(c10::ArrayRef<Use> uses) override;
  /// Closes the parameters. What was written enters the shards once all ranks have written it, or have closed.
  void release(c10::ArrayRef<Use> uses, bool succeeded) override;
  bool lends() const override { return true; }

  /// Collective: call it over and over until it returns each rank's message, in the team's order. Posts `own` in every
  /// round, and serves ranks that still need units, until all ranks close. Then every shard has what its rank wrote.
  /// Returns nothing after each round, and after about `limit` without one. `ends_pass`: the plan learns which units
  /// the pass has used. Errors: CommError.
  std::optional<std::vector<comm::Close>> close_for(std::chrono::milliseconds limit, const comm::Close& own,
                                                    bool ends_pass);
  /// Serves the others while this rank waits for something else than a unit: call it over and over. Waits for gathers
  /// that are due, never for a rank that is not in a round.
  void attend();
  /// Likewise, once: what the rounds were told goes out now, though a word of this rank's may be under way.
  void tell() {
    attend();
    const std::lock_guard lock(mutex_);
    if (rounds_.is_untold()) rounds_.post_behind(comm::Wishes{.writes = -1});
  }
  /// Does what attend() does, but waits up to about `limit` for a round.
  void attend_for(std::chrono::milliseconds limit);
  /// Before reductions that the lane which computes may wait for: later gathers wait for what has changed shards until
  /// now, as an optimizer's state or a parameter set by hand between forward and backward, and not for those.
  void begin_reductions() {
    const std::lock_guard lock(mutex_);
    order_gathers_after_shards();
  }
  comm::Rounds& rounds() const { return rounds_; }
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
  /// Returns `forecast`'s bytes. Models that use units in another order may take up to `budget()` elements; an operator
  /// that uses more by itself, or a rank that writes parameters which others do not, takes what it needs.
  int64_t predicted_bytes() const;
  int64_t gathers_issued() const { return gathers_issued_; }

 private:
  struct Gather {
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
  comm::Wishes request(const std::vector<Unit*>& needed) const;
  void add_wishes(comm::Wishes& word, const std::vector<Unit*>& needed) const;
  void serve(const std::vector<comm::Word>& words);
  void commit_writes(const std::vector<comm::Word>& words);
  bool end_close(const std::vector<comm::Word>& words, bool ends_pass);
  void list_ahead(comm::Close& word) const;
  std::vector<comm::Word> collect(const comm::Site& site);
  std::optional<std::vector<comm::Word>> collect_for(std::chrono::milliseconds limit, const comm::Site& site);
  void advance_gathers();
  comm::Group& group_of(const Unit& unit) const { return gathers_.of(unit.shard_over()); }
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
  comm::TeamGroups gathers_;
  comm::Rounds& rounds_;
  at::Device device_;
  device::Lane gather_lane_;    // whole units arrive on it, while the current lane computes
  bool shards_changed_ = true;  // perhaps, since the gather lane was last put behind the current one
  device::BufferPool pool_;
  int64_t launched_by_all_ = 0;  // reductions, as far as this rank knows
  ResidencyLimits limits_;
  std::vector<GateEntry> entries_;
  std::optional<Watch> watch_;  // nothing: no unit is sharded

  mutable std::mutex mutex_;
  mutable Plan train_plan_;
  mutable Plan eval_plan_;
  std::deque<Gather> under_way_;
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
