// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs rounds and gathers, and keeps the pins and the budget of live units.
#include "sharding/residency.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>

#include "base/interrupt.h"
#include "comm/blocking.h"
#include "device/unseen.h"
#include "sharding/round_words.h"

namespace deeptide::sharding {

using at::Tensor;
using comm::Close;
using comm::Wishes;
using comm::Word;
using device::Lane;
using std::chrono::milliseconds;

namespace {

constexpr int kMostReadAhead = 64;  // units
constexpr milliseconds kPeriod{250};
constexpr milliseconds kTurn{5};  // in which gathers go on where callers move the bytes

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }
bool training() { return in_backward() || at::GradMode::is_enabled(); }

std::vector<int64_t> numels_of(const std::vector<Unit*>& units) {
  std::vector<int64_t> numels;
  for (const Unit* unit : units) numels.push_back(unit ? unit->numel() : 0);
  return numels;
}

bool contains(const std::vector<Unit*>& units, const Unit* unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

int64_t two_largest(const std::vector<const UnitLayout*>& units) {
  int64_t first = 0, second = 0;
  for (const UnitLayout* unit : units) {
    if (unit->numel > first) {
      second = std::exchange(first, unit->numel);
    } else {
      second = std::max(second, unit->numel);
    }
  }
  return first + second;
}

Residency::Residency(std::vector<Unit*> units, comm::TeamGroups gathers, comm::Rounds& rounds,
                     std::shared_ptr<device::Ledger> ledger, at::Device device, const ResidencyLimits& limits)
    : units_(std::move(units)),
      gathers_(std::move(gathers)),
      rounds_(rounds),
      device_(device),
      gather_lane_(device::Lane::create(device)),
      pool_(ledger, device::Role::gathered, device, kGatheredWaste, {}, gather_lane_),
      limits_(limits),
      train_plan_(numels_of(units_), /*backward=*/true),
      eval_plan_(numels_of(units_), /*backward=*/false),
      pending_writes_(std::move(ledger)),
      last_use_(units_.size(), 0) {
  const auto layouts = layouts_of(units_);
  limits_.max_live = std::max(limits_.max_live, two_largest(layouts));
  predicted_bytes_ = forecast(layouts, limits_);
  pool_.keep_within(predicted_bytes_);  // ranks that run apart take other sizes than a rank that runs alone
  for (Unit* unit : units_) {
    if (unit == nullptr) continue;
    for (Parameter& p : unit->parameters()) entries_.emplace_back(p, *this);
  }
  if (!entries_.empty()) watch_.emplace(*this);
}

Residency::~Residency() {
  entries_.clear();
  if (!device_.is_cpu()) order_before_frees();
}

/// Units that are whole free their buffers after this, as in BucketQueue.
void Residency::order_before_frees() {
  try {
    const Lane current = Lane::current(device_);
    for (Gather& gather : under_way_) {
      group_of(*gather.unit).order_before(gather_lane_, gather.pending, site("dropping", *gather.unit));
    }
    gather_lane_.wait_for(current.mark());
    current.wait_for(gather_lane_.mark());
  } catch (const std::exception&) {  // a device or a channel that has failed gives no memory to anybody
  }
}

void Residency::acquire(c10::ArrayRef<Use> uses) {
  refuse_in_interrupt_handler("an operator with a sharded parameter");
  auto work = [&] { acquire_locked(uses); };
  comm::run_blocking(std::ref(work));  // by reference: no allocation per operator
}

void Residency::release(c10::ArrayRef<Use> uses, bool succeeded) {
  auto work = [&] { release_locked(uses, succeeded); };
  comm::run_blocking(std::ref(work));
}

void Residency::acquire_locked(c10::ArrayRef<Use> uses) {
  const device::Unseen unseen;
  const trace::RecorderScope scope(gathers_.whole().recorder());
  std::lock_guard lock(mutex_);
  needed_.clear();
  const int before = last_visited_;
  for (const Use& use : uses) {
    Unit* unit = use.parameter->unit;
    if (!contains(needed_, unit)) needed_.push_back(unit);
    visit(*unit);
  }
  // A round of wishes is posted at one unit and collected at the next, never 'when it happens to be ready'. What is
  // whole then depends on the program alone: ranks with equal programs hold equal units and wait for no absent rank.
  const bool moved = last_visited_ != before;
  if (moved && rounds_.posted()) serve(collect(site("agreeing ahead of", *needed_.front())));
  const bool all_whole = std::all_of(needed_.begin(), needed_.end(), [](Unit* u) { return u->is_whole(); });
  if (!all_whole) bring(needed_);
  if (moved) look_ahead();
  if (moved && limits_.read_ahead_bytes > 0) read_ahead();
  for (const Use& use : uses) use.parameter->unit->open(*use.parameter);  // last: a throw above leaves nothing open
  for (const Use& use : uses) {
    if (use.write) pending_writes_.begin(*use.parameter);
  }
}

/// Keeps a round of wishes under way, so that the next units arrive while this operator computes.
void Residency::look_ahead() {
  if (rounds_.posted()) return;
  Wishes word;
  add_wishes(word, needed_);
  if (word.num_wishes > 0) post(word);
}

/// Announces the shards of the units to come, nearest first: a gather then finds them read.
void Residency::read_ahead() const {
  int64_t bytes = 0;
  for (const int index : plan().upcoming(kMostReadAhead)) {
    const Unit* unit = units_[index];
    if (unit == nullptr || unit->is_whole() || in_flight(*unit)) continue;
    const tiers::Buffer& shard = unit->shard();
    bytes += shard.nbytes() - shard.resident_bytes();
    if (bytes > limits_.read_ahead_bytes) return;
    for (int64_t block = 0; block < shard.num_blocks(); ++block) shard.prefetch(shard.block(block));
  }
}

void Residency::post(Word word) {
  std::visit([&](auto& message) { message.writes = pending_writes_.claim(); }, word);
  rounds_.post(word);
}

void Residency::release_locked(c10::ArrayRef<Use> uses, bool succeeded) {
  const device::Unseen unseen;
  std::lock_guard lock(mutex_);
  bool writes = false;
  for (const Use& use : uses) {
    Unit& unit = *use.parameter->unit;
    if (use.write) pending_writes_.end(*use.parameter, succeeded);
    writes = writes || use.write;
    unit.close(*use.parameter);
  }
  if (writes) gather_lane_.wait_for(Lane::current(device_).mark());
  if (succeeded) return;
  for (const Use& use : uses) {  // values that a failed operator half wrote are dropped: the next use gathers anew
    Unit& unit = *use.parameter->unit;
    if (use.write && unit.is_whole() && may_go(unit)) let_go(unit);
  }
}

void Residency::visit(const Unit& unit) {
  last_use_[unit.index()] = ++clock_;
  if (last_visited_ == unit.index()) return;
  const int previous = std::exchange(last_visited_, unit.index());
  plan().visit(unit.index());
  trace::enter_unit(gathers_.whole().recorder(), phase(), gathers_.whole().step(), unit.layout().name);
  if (previous < 0 || limits_.max_reuse_distance >= limits_.max_live) return;
  Unit* left = units_[previous];
  if (!left->is_whole() || !may_go(*left) || contains(needed_, left)) return;
  const auto until = plan().elements_until(previous);
  if (!until || *until > limits_.max_reuse_distance) let_go(*left);
}

void Residency::bring(const std::vector<Unit*>& needed) {
  for (Unit* unit : needed) {
    while (!unit->is_whole()) {
      if (in_flight(*unit)) {
        land_front();
      } else {
        if (!rounds_.posted()) post(request(needed));
        serve(collect(site("agreeing on", *unit)));
      }
    }
  }
}

Wishes Residency::request(const std::vector<Unit*>& needed) const {
  Wishes word;
  for (const Unit* unit : needed) {
    if (unit->is_whole() || in_flight(*unit) || word.full()) continue;
    word.units[word.num_needs++] = unit->index();
  }
  add_wishes(word, needed);
  return word;
}

void Residency::add_wishes(Wishes& word, const std::vector<Unit*>& needed) const {
  int64_t ahead = 0;
  int64_t live = pending_writes_.numel();  // what must stay, units needed now, units used sooner, and the wishes
  for (const Unit* unit : needed) live += pending_writes_.has(*unit) ? 0 : unit->numel();
  for (int index : plan().upcoming(Wishes::kMaxUnits)) {
    const Unit* unit = units_[index];
    if (unit == nullptr || contains(needed, unit)) continue;
    live += unit->numel();
    if (live > limits_.max_live) return;
    if (unit->is_whole() || in_flight(*unit)) continue;
    ahead += unit->numel();
    if (ahead > limits_.prefetch || word.full()) return;
    word.units[word.num_needs + word.num_wishes++] = index;
  }
}

void Residency::serve(const std::vector<Word>& words) {
  launched_by_all_ = rounds_.launched_by_all();
  commit_writes(words);  // first: a rank that needs a unit again has written it as often as the others
  for (const auto& [index, wanted] : agree(words, gathers_.whole().index())) {
    Unit& unit = *units_[index];
    if (in_flight(unit)) land_all();
    launch(unit, wanted && !unit.is_whole());
  }
}

/// Ranks that have made equally many writes have made the same ones: now their shards may show them.
void Residency::commit_writes(const std::vector<Word>& words) {
  if (pending_writes_.empty() || writes_of(words.front()) <= 0 || !wrote_alike(words)) return;
  land_all();  // gathers that were agreed before still send the shards as they are
  {
    const Lane::Scope on_lane(gather_lane_);  // which follows each write, and no reduction of a backward under way
    pending_writes_.commit_claimed();
  }
  Lane::current(device_).wait_for(gather_lane_.mark());
}

/// A gather reads a shard that a step, a load or a write of the program's may have changed on the lane that computes.
/// It need not wait for anything else there but the last use of its buffer. That may come after a reduction which
/// another rank begins only when it has what is gathered here: then the gather takes another buffer, beyond the limit.
void Residency::order_gathers_after_shards() {
  if (std::exchange(shards_changed_, false)) gather_lane_.wait_for(Lane::current(device_).mark());
}

void Residency::launch(Unit& unit, bool keep) {
  make_room(unit.numel());
  order_gathers_after_shards();
  const Lane::Scope on_lane(gather_lane_);
  Tensor buffer = pool_.take(unit.numel(), unit.layout().dtype, launched_by_all_);
  const Tensor own = unit.shard_for(buffer);  // first: if it cannot be read, nothing was issued or counted
  count(unit, +1);
  auto pending = group_of(unit).all_gather(buffer, own);
  under_way_.push_back({&unit, std::move(buffer), std::move(pending), gather_lane_.mark(), keep});
  ++gathers_issued_;
}

bool Residency::in_flight(const Unit& unit) const {
  return std::any_of(under_way_.begin(), under_way_.end(), [&](const Gather& gather) { return gather.unit == &unit; });
}

void Residency::land_front() {
  Gather& gather = under_way_.front();
  // Units that only other ranks use need not arrive before this one computes on.
  const Lane lane = gather.keep ? Lane::current(device_) : gather_lane_;
  lane.wait_for(gather.issued);
  group_of(*gather.unit).order_before(lane, gather.pending, site("gathering", *gather.unit));
  if (gather.keep) {
    gather.unit->attach(std::move(gather.buffer));
  } else {
    const Lane::Scope on_lane(gather_lane_);
    count(*gather.unit, -1);
    pool_.put(std::move(gather.buffer));
  }
  under_way_.pop_front();
}

/// Afterwards shards may change on the current lane: all that was sent of them is on its way before.
void Residency::land_all() {
  while (!under_way_.empty()) land_front();
  Lane::current(device_).wait_for(gather_lane_.mark());
}

void Residency::make_room(int64_t numel) {
  while (live_numel_ + numel > limits_.max_live) {
    if (Unit* victim = choose_victim()) {
      let_go(*victim);
    } else if (!under_way_.empty()) {
      land_all();
    } else {
      return;  // the operator in flight needs more than the budget and must have all of it
    }
  }
}

Unit* Residency::choose_victim() const {
  Unit* victim = nullptr;
  std::pair<int64_t, int64_t> highest;
  auto rank_of = [&](const Unit& u) {  // farthest next use first, then least recently used
    return std::make_pair(plan().distance(u.index()).value_or(INT64_MAX), -last_use_[u.index()]);
  };
  for (Unit* unit : units_) {
    if (unit == nullptr || !unit->is_whole() || !may_go(*unit) || contains(needed_, unit)) continue;
    const auto rank = rank_of(*unit);
    if (victim != nullptr && rank <= highest) continue;
    victim = unit;
    highest = rank;
  }
  return victim;
}

bool Residency::may_go(const Unit& unit) const { return !unit.is_pinned() && !pending_writes_.has(unit); }

void Residency::let_go(Unit& unit) {
  count(unit, -1);
  pool_.put(unit.detach(), rounds_.awaited());
}

void Residency::count(const Unit& unit, int sign) {
  live_numel_ += sign * unit.numel();
  live_bytes_ += sign * unit.numel() * static_cast<int64_t>(c10::elementSize(unit.layout().dtype));
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
}

/// Ranks that need a unit may wait for this rank's part of its gather, where callers move the bytes.
void Residency::advance_gathers() {
  if (gathers_.whole().advances_alone()) return;
  for (Gather& gather : under_way_) {
    if (!gather.pending.wait_for(milliseconds(0))) return;
  }
}

std::vector<Word> Residency::collect(const comm::Site& here) {
  for (;;) {
    if (auto words = collect_for(kPeriod, here)) return *std::move(words);
  }
}

std::optional<std::vector<Word>> Residency::collect_for(milliseconds limit, const comm::Site& here) {
  if (gathers_.whole().advances_alone() || under_way_.empty()) return rounds_.collect_for(limit, here);
  advance_gathers();
  return rounds_.collect_for(std::min(limit, kTurn), here);
}

void Residency::attend() {
  if (rounds_.are_wishes_alike()) return;  // nobody waits for this rank's, and gathers are issued where the program is
  auto work = [&] {
    std::lock_guard lock(mutex_);
    advance_gathers();
    if (rounds_.ready()) {
      serve(rounds_.collect({"backward", "serving ranks that are behind"}));
      land_all();
    }
    if (!rounds_.posted()) post(Wishes());
  };
  comm::run_blocking(std::ref(work));
}

void Residency::attend_for(milliseconds limit) {
  auto work = [&] {
    std::lock_guard lock(mutex_);
    if (!rounds_.posted()) post(Wishes());
    const auto words = collect_for(limit, {"backward", "waiting until all ranks have begun the same reductions"});
    if (!words) return;
    serve(*words);
    land_all();
  };
  comm::run_blocking(std::ref(work));
}

std::optional<std::vector<Close>> Residency::close_for(milliseconds limit, const Close& own, bool ends_pass) {
  std::lock_guard lock(mutex_);
  needed_.clear();
  if (!rounds_.posted()) {
    Close word = own;
    if (ends_pass) list_ahead(word);
    post(word);
  }
  const auto words = collect_for(limit, {"step", "waiting for all ranks to end the micro-batch"});
  if (!words) return std::nullopt;
  serve(*words);
  if (!end_close(*words, ends_pass)) return std::nullopt;
  std::vector<Close> closes;
  for (const Word& each : *words) closes.push_back(std::get<Close>(each));
  ahead_ = agree_ahead(closes);
  return closes;
}

/// Returns whether all ranks have closed. Gathers ahead of the next pass stay under way where no shard changes.
bool Residency::end_close(const std::vector<Word>& words, bool ends_pass) {
  const bool all_close =
      std::all_of(words.begin(), words.end(), [](const Word& word) { return std::holds_alternative<Close>(word); });
  const bool keeps_shards = all_close && !ends_pass && pending_writes_.empty() && wrote_alike(words);
  if (!keeps_shards) land_all();
  if (!all_close) return false;
  pending_writes_.commit();
  shards_changed_ = true;
  if (!wrote_alike(words)) let_go_of_all();  // the ranks' whole copies differ: the shards are what holds
  if (ends_pass) {
    train_plan_.finish_pass();
    eval_plan_.finish_pass();
    last_visited_ = -1;
  }
  return true;
}

/// Lists as much as may be asked for ahead, and may be live. Shards in files are read in forward, beside its work.
void Residency::list_ahead(Close& word) const {
  int64_t numel = 0;
  for (const int index : train_plan_.start(Wishes::kMaxUnits)) {
    if (units_[index] == nullptr) continue;
    if (units_[index]->shard().tier() == tiers::Tier::nvme) return;
    numel += units_[index]->numel();
    if (numel > std::min(limits_.max_live, limits_.prefetch)) return;
    word.units_ahead[word.num_ahead++] = index;
  }
}

void Residency::begin_step() {
  release_all();
  std::lock_guard lock(mutex_);
  // All ranks have completed the same reductions: whatever used a gathered buffer waits for no other.
  launched_by_all_ = std::max(launched_by_all_, rounds_.launched());
}

void Residency::note_stepped(Unit& unit) {
  std::lock_guard lock(mutex_);
  shards_changed_ = true;
  const auto found = std::find(ahead_.begin(), ahead_.end(), unit.index());
  if (found == ahead_.end()) return;
  ahead_.erase(found);
  launch(unit, /*keep=*/true);
}

void Residency::end_step() {
  std::lock_guard lock(mutex_);
  shards_changed_ = true;
  for (const int index : std::exchange(ahead_, {})) launch(*units_[index], /*keep=*/true);
}

void Residency::release_all() {
  std::lock_guard lock(mutex_);
  needed_.clear();
  land_all();
  let_go_of_all();
  trim();
  shards_changed_ = true;
}

void Residency::let_go_of_all() {
  for (Unit* unit : units_) {
    if (unit != nullptr && unit->is_whole() && may_go(*unit)) let_go(*unit);
  }
}

/// Keeps idle buffers for as much as may be live.
void Residency::trim() {
  int64_t item = 0;
  for (const Unit* unit : units_) {
    if (unit != nullptr) item = std::max(item, static_cast<int64_t>(c10::elementSize(unit->layout().dtype)));
  }
  pool_.trim(limits_.max_live * item);
}

int64_t Residency::predicted_bytes() const { return predicted_bytes_; }

int64_t Residency::live_bytes() const {
  std::lock_guard lock(mutex_);
  return live_bytes_;
}

int64_t Residency::peak_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_bytes_;
}

Plan& Residency::plan() const { return training() ? train_plan_ : eval_plan_; }

comm::Site Residency::site(const char* verb, const Unit& unit) const {
  return {phase(), std::string(verb) + " unit '" + unit.layout().name + "' (first parameter '" +
                       unit.parameters().front().name + "')"};
}

}  // namespace deeptide::sharding
