// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sends, sums and lends buckets. The thread that has time sums.
#include "gradients/flights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "base/start_thread.h"
#include "comm/blocking.h"
#include "comm/nonzero_blocks.h"
#include "device/parallel.h"
#include "gradients/forecast.h"
#include "numerics/ordered_sum.h"

namespace deeptide::gradients {

using at::Tensor;
using device::Lane;
using device::Role;
using numerics::Contributions;
using sharding::Parameter;
using sharding::Unit;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

namespace {

// A peer that is late (in another branch) must not block this rank's backward: buckets then accumulate instead.
constexpr milliseconds kFlightPatience{500};
constexpr milliseconds kMoment{10};
constexpr milliseconds kSidePatience{20};
constexpr int kSideNice = 10;

/// Returns whether what `wait` waits for comes soon. After a moment it calls `meanwhile` repeatedly: the peer may be in
/// step(), where it goes on only once it knows how far this rank is.
bool is_soon(const std::function<bool(milliseconds)>& wait, const std::function<void()>& meanwhile) {
  if (wait(kMoment)) return true;
  const auto end = steady_clock::now() + kFlightPatience;
  while (steady_clock::now() < end) {
    if (meanwhile) meanwhile();
    if (wait(kMoment)) return true;
  }
  return false;
}

numerics::Squares squares_of(Block block) {
  return block.begin == 0 ? numerics::Squares::begin : numerics::Squares::go_on;
}

}  // namespace

/// While it lives, the side thread starts no sum; the constructor waits for the current one. Errors: what ended the
/// side thread, each time.
class Flights::Pause {
 public:
  explicit Pause(Flights& flights) : flights_(flights) {
    if (!flights_.side_thread_.joinable()) return;
    comm::run_blocking([&] {
      std::unique_lock lock(flights_.mutex_);
      flights_.side_may_work_ = false;
      flights_.changed_.wait(lock, [&] { return !flights_.side_is_busy_; });
    });
    if (flights_.side_failure_) std::rethrow_exception(flights_.side_failure_);
  }
  ~Pause() {
    if (!flights_.side_thread_.joinable()) return;
    std::lock_guard lock(flights_.mutex_);
    flights_.side_may_work_ = true;
    flights_.changed_.notify_all();
  }

 private:
  Flights& flights_;
};

Flights::Flights(const std::vector<Unit*>& units, comm::Group& group, host::Exchange* exchange,
                 std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options,
                 device::BufferPool& buckets)
    : units_(units),
      group_(group),
      exchange_(exchange),
      buckets_(buckets),
      device_(device),
      send_lane_(device::Lane::create(device)),
      sum_lane_(device::Lane::create(device)),
      receive_pool_(ledger, options.keep_rows ? Role::gradients : Role::communication, device, kMaxBucketWaste, {},
                    send_lane_),
      options_(options),
      ledger_(std::move(ledger)),
      accumulators_(units_.size()),
      kept_at_(units_.size(), -1),
      accumulated_(units_.size(), false),
      sums_of_squares_(
          at::zeros({static_cast<int64_t>(units_.size())}, at::TensorOptions().dtype(at::kDouble).device(device))),
      check_(units_, options_.ordered ? group_.size() : 0, sums_of_squares_, options_.finite_check) {
  if (options_.together > 1) {
    hierarchy_ = std::make_unique<HierarchicalSums>(
        group_, *exchange_, options_.together,
        HierarchicalSums::Hooks{
            .lend = [this](Tensor bucket, uint32_t offer) { lend(std::move(bucket), offer); },
            .note = [this](const auto& bad) { check_.note_element(bad.unit, bad.element, bad.rank); }});
  }
  if (options_.reserve) {
    receive_pool_.reserve(reserved_buffers(sharding::layouts_of(units_), options_, group_.size(), in_place()).received);
  }
  if (options_.offload) files_.emplace(*options_.offload, ledger_, Role::gradients, "gradients");
  if (const auto cuts = cuts_of(sharding::layouts_of(units_), options_); !cuts.empty()) {
    host_sums_ = std::make_unique<HostSums>(ledger_, device_, cuts, options_.accumulate_dtype);
  }
  for (int unit = 0; !options_.keep_rows && unit < static_cast<int>(units_.size()); ++unit) {
    if (!leaves(unit)) accumulator(unit);
  }
  if (options_.side_thread) side_thread_ = start_thread([this] { run_side_thread(); });
}

Flights::~Flights() {
  if (!device_.is_cpu()) order_before_frees();
  if (!side_thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  comm::run_blocking([&] { side_thread_.join(); });
}

void Flights::launch(int unit, Tensor bucket, const std::function<void()>& meanwhile) {
  limit(meanwhile);
  if (options_.reserve && group_.size() > 1 && !in_place()) {
    make_room(receive_pool_, received_numel(unit), received_dtype(), meanwhile);
  }
  trace::flight_log().enter(group_.step(), "backward", units_[unit]->layout().name);
  Flight flight;
  flight.unit = unit;
  flight.sent = std::move(bucket);
  flight.filled = Lane::current(device_).mark();
  send(flight);
  ++launched_;
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(flight));
  changed_.notify_all();
}

int64_t Flights::received_numel(int unit) const {
  const sharding::UnitLayout& layout = units_[unit]->layout();
  if (hierarchy_) return hierarchy_->memory_numel(layout.numel);
  return options_.ordered ? layout.numel : layout.shard;
}

void Flights::send(Flight& flight) {
  send_lane_.wait_for(flight.filled);
  const Lane::Scope on_lane(send_lane_);
  if (in_place()) {
    auto offer = exchange_->offer(flight.sent);
    flight.pending =
        group_.track(std::move(offer.operation), "reduce-scatter", static_cast<int64_t>(flight.sent.nbytes()));
    flight.offer = offer.number;
  } else if (hierarchy_) {
    flight.received = receive_pool_.take(received_numel(flight.unit), received_dtype());
    flight.hierarchical = true;
    flight.pending = hierarchy_->start(flight.unit, std::exchange(flight.sent, Tensor()), flight.received);
  } else if (group_.size() > 1 && options_.ordered) {
    flight.received = receive_pool_.take(received_numel(flight.unit), options_.reduce_dtype);
    flight.own_row_stays = !options_.keep_rows;  // kept rows leave the bucket to others
    flight.pending = group_.all_to_all(flight.received, flight.sent,
                                       flight.own_row_stays ? comm::OwnRow::left : comm::OwnRow::copied);
  } else if (group_.size() > 1) {
    flight.received = receive_pool_.take(received_numel(flight.unit), options_.reduce_dtype);
    flight.pending = group_.reduce_scatter(flight.received, flight.sent);
  }
}

void Flights::reduce_mostly_zero(int unit, Tensor bucket) {
  const Pause pause(*this);
  Flight flight;
  flight.unit = unit;
  flight.sent = std::move(bucket);
  flight.received = receive_pool_.take(flight.sent.numel(), options_.reduce_dtype);
  comm::all_to_all_nonzero(group_, flight.received, flight.sent, buckets_, site(unit, "step"));
  sum(flight);
}

/// At most a quarter of all offers: another rank that is ahead has as many unread, and kept rows add some more.
size_t most_ahead(size_t num_units, bool shares_memory) {
  const size_t pace = shares_memory ? kMaxOffers : kMaxFlights;
  return std::clamp(kMaxRoundsAhead * num_units, pace, static_cast<size_t>(host::Exchange::kMaxOffers / 4));
}

bool Flights::has_room() {
  std::lock_guard lock(mutex_);
  return queue_.size() < most_ahead();
}

void Flights::limit(const std::function<void()>& meanwhile) {
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() < pace()) return;
  }
  const Pause pause(*this);
  if (!device_.is_cpu() || queue_.size() >= most_ahead()) return retire_front(meanwhile);
  retire_soon(meanwhile);
}

void Flights::make_room(int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile) {
  if (!options_.reserve) return;
  if (exchange_) reclaim();
  make_room(buckets_, numel, dtype, meanwhile);
}

void Flights::make_room(device::BufferPool& pool, int64_t numel, at::ScalarType dtype,
                        const std::function<void()>& meanwhile) {
  if (pool.has(numel, dtype)) return;
  const Pause pause(*this);
  while (!pool.has(numel, dtype) && (retire_soon(meanwhile) || reclaim_soon(meanwhile))) continue;
}

/// What has been offered on this host goes on to the others: a bucket behind the one that this rank waits for, too.
void Flights::go_on() {
  if (hierarchy_) hierarchy_->go_on();
}

/// Retires the front flight, if it arrives soon. Returns whether there was one that did.
bool Flights::retire_soon(const std::function<void()>& meanwhile) {
  if (queue_.empty()) return false;
  Flight& front = queue_.front();
  if (peers_elsewhere_ && !front.pending.ready()) return false;  // waited for once already
  const auto wait = [&](milliseconds limit) {
    go_on();
    return group_.wait_for(front.pending, limit, site(front.unit));
  };
  peers_elsewhere_ = !is_soon(wait, meanwhile);
  if (!peers_elsewhere_) retire_front();
  return !peers_elsewhere_;
}

/// As retire_soon, for the bucket here that was lent first.
bool Flights::reclaim_soon(const std::function<void()>& meanwhile) {
  if (lent_.empty()) return false;
  const uint32_t offer = lent_.front().offer;
  if (readers_elsewhere_ && !exchange_->all_read(offer)) return false;
  const auto wait = [&](milliseconds limit) {
    bool done = false;
    comm::run_blocking([&] { done = exchange_->wait_read(offer, limit); });
    return done;
  };
  readers_elsewhere_ = !is_soon(wait, meanwhile);
  reclaim();
  return !readers_elsewhere_;
}

void Flights::retire_ready() {
  if (side_thread_.joinable()) return;  // its task
  if (!device_.is_cpu()) return;        // sums wait for what arrives; which bucket is next must not depend on timing
  go_on();
  while (!queue_.empty() && queue_.front().pending.ready()) retire_front();
}

/// Buffers that are dropped have been used on several lanes: puts these uses before the next ones of their memory.
void Flights::order_before_frees() {
  try {
    const Lane current = Lane::current(device_);
    for (Flight& flight : queue_) group_.order_before(sum_lane_, flight.pending, site(flight.unit));
    sum_lane_.wait_for(current.mark());
    send_lane_.wait_for(sum_lane_.mark());
    current.wait_for(send_lane_.mark());
  } catch (const std::exception&) {  // a device or a channel that has failed gives no memory to anybody
  }
}

void Flights::drain() {
  const Pause pause(*this);
  while (!queue_.empty()) retire_front();
  Lane::current(device_).wait_for(sum_lane_.mark());
}

void Flights::retire_front(const std::function<void()>& meanwhile) {
  Flight& flight = queue_.front();
  const auto go_on_meanwhile = [&] {
    go_on();
    if (meanwhile) meanwhile();
  };
  group_.order_before(sum_lane_, flight.pending, site(flight.unit),
                      hierarchy_ ? std::function<void()>(go_on_meanwhile) : meanwhile);
  ++retired_;
  sum_lane_.wait_for(flight.filled);  // before it, the caller's lane has used what the sum overwrites
  const Lane::Scope on_lane(sum_lane_);
  sum(flight);
  queue_.pop_front();
  peers_elsewhere_ = false;
}

/// Consumes an arrived reduction. A second reduction of a unit in one step adds to the first, so the sum is needed now.
void Flights::sum(Flight& flight) {
  if (flight.received.defined() && !flight.own_row_stays) {
    buckets_.put(std::exchange(flight.sent, Tensor()));  // it may be refilled meanwhile
  }
  if (options_.keep_rows && !accumulated_[flight.unit]) return keep(flight);
  accumulate_kept();
  add(flight);
}

void Flights::keep(Flight& flight) {
  const int unit = flight.unit;
  const Contributions rows = contributions(flight);
  numerics::ordered_squares(rows, sums_of_squares_.narrow(0, unit, 1));
  check_.note(unit, rows, /*first=*/true, [&] { return rows.sum(); });
  accumulated_[unit] = true;
  kept_at_[unit] = static_cast<int>(kept_.size());
  kept_.push_back(std::move(flight));
}

void Flights::accumulate_kept() {
  for (Flight& flight : std::exchange(kept_, {})) {
    kept_at_[flight.unit] = -1;
    accumulated_[flight.unit] = false;
    add(flight);
  }
}

void Flights::add(Flight& flight) {
  const int unit = flight.unit;
  const Contributions rows = contributions(flight);
  const bool first = !accumulated_[unit];
  const Tensor squares = sums_of_squares_.narrow(0, unit, 1);
  change(unit, first, [&](Block block, const Tensor& sum) {
    const Contributions part = rows.narrow(block.begin, block.count);
    numerics::ordered_sum(part.rows, part.scale, first, sum, squares, squares_of(block));
  });
  check_.note(unit, rows, first, [&] { return gradient(unit).sum(); });
  accumulated_[unit] = true;
  give_back(flight);
}

/// Visits the unit's sum block by block, where the sum is made. `first`: its values are undefined.
void Flights::change(int unit, bool first, const Visit& visit) {
  if (leaves(unit)) {
    return host_sums_->change(unit, first, [&](const Tensor& sum) { visit({0, sum.numel()}, sum); });
  }
  const Buffer& total = accumulator(unit);
  for_each_block(total, {0, total.numel()}, [&](Block block) {
    const auto sum = total.lease(block, first ? Access::write : Access::update);
    if (const int64_t next = block.begin + block.count; !first && next < total.numel()) total.prefetch({next, 1});
    visit(block, sum.tensor());
  });
  total.write_behind();
}

const Buffer& Flights::accumulator(int unit) {
  Buffer& shard = accumulators_[unit];
  const int64_t numel = units_[unit]->layout().shard;
  const at::ScalarType dtype = options_.accumulate_dtype;
  if (!shard.defined()) {
    shard = files_ ? files_->place(numel, dtype)
                   : Buffer::resident(device::allocate_flat(ledger_, Role::gradients, numel, dtype, device_));
  }
  return shard;
}

UnitGradient Flights::gradient(int unit) {
  if (kept_at_[unit] >= 0) return contributions(kept_[kept_at_[unit]]);
  return leaves(unit) ? host_sums_->gradient(unit) : UnitGradient(accumulator(unit));
}

UnitGradient Flights::gradient_on_device(int unit) {
  return leaves(unit) ? UnitGradient(host_sums_->lend(unit)) : gradient(unit);
}

void Flights::prefetch(int unit, int64_t element) const {
  const Buffer& sums = accumulators_[unit];
  if (sums.defined() && element < sums.numel()) sums.prefetch({element, 1});
}

/// Returns the addends of this rank's shard, by rank.
Contributions Flights::contributions(const Flight& flight) const {
  const Unit& u = *units_[flight.unit];
  const int64_t shard = u.layout().shard;
  if (in_place()) return {exchange_->rows(flight.offer, u.shard_begin(), shard, options_.reduce_dtype), options_.scale};
  if (flight.hierarchical) return {hierarchy_->rows(flight.received), options_.scale};
  const Tensor& flat = flight.received.defined() ? flight.received : flight.sent;
  std::vector<Tensor> rows;
  for (int64_t begin = 0; begin < flat.numel(); begin += shard) {
    const bool own = flight.own_row_stays && begin == u.shard_begin();
    rows.push_back((own ? flight.sent : flat).narrow(0, begin, shard));
  }
  if (rows.empty()) rows.push_back(flat);
  return {std::move(rows), options_.scale};
}

void Flights::give_back(Flight& flight) {
  receive_pool_.put(std::move(flight.received));
  if (in_place()) return lend(std::move(flight.sent), flight.offer);
  buckets_.put(std::move(flight.sent));
}

/// This rank has read all that the host's ranks offered up to there; they may still read what it offered.
void Flights::lend(Tensor bucket, uint32_t offer) {
  exchange_->set_read(offer);
  {
    std::lock_guard lock(mutex_);
    lent_.push_back({std::move(bucket), offer});
  }
  reclaim();
}

void Flights::reclaim() {
  std::lock_guard lock(mutex_);
  while (!lent_.empty() && exchange_->all_read(lent_.front().offer)) {
    buckets_.put(std::move(lent_.front().sent));
    lent_.pop_front();
  }
}

double Flights::sum_of_squares() {
  const double total = check_.total(accumulated_);
  if (!std::isfinite(total)) check_.find(accumulated_, [this](int unit) { return gradient(unit).sum(); });
  return total;
}

bool Flights::has_accumulated() const {
  for (bool accumulated : accumulated_) {
    if (accumulated) return true;
  }
  return false;
}

void Flights::overwrite(int unit, int64_t begin, const Tensor& values) {
  accumulate_kept();
  const int64_t end = begin + values.numel();
  const Tensor squares = sums_of_squares_.narrow(0, unit, 1);
  const bool first = !accumulated_[unit];
  change(unit, first, [&](Block block, const Tensor& sum) {
    if (first) sum.zero_();
    const int64_t from = std::max(begin, block.begin), to = std::min(end, block.end());
    if (from < to) sum.narrow(0, from - block.begin, to - from).copy_(values.narrow(0, from - begin, to - from));
    numerics::ordered_squares(sum, squares, squares_of(block));
  });
  accumulated_[unit] = true;
  check_.note_overwritten(unit, [&] { return gradient(unit).sum(); });
}

void Flights::clear_accumulated() {
  for (Flight& flight : std::exchange(kept_, {})) give_back(flight);
  kept_at_.assign(kept_at_.size(), -1);
  accumulated_.assign(accumulated_.size(), false);
  check_.clear();
}

/// What lies in files takes none.
void Flights::release_memory() {
  receive_pool_.trim();
  if (!files_) accumulators_.assign(accumulators_.size(), Buffer());
  if (host_sums_) host_sums_->release_memory();
}

/// Sums arrived flights. Late or lost flights remain for `drain`, which reports them, as it does an exception here.
void Flights::run_side_thread() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kSideNice);
  const RunInline on_this_thread;
  at::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (side_may_work_ && !queue_.empty()); });
    if (stop_) return;
    side_is_busy_ = true;
    Flight& front = queue_.front();
    lock.unlock();
    bool arrived = false;
    std::exception_ptr failure;
    try {
      go_on();
      arrived = front.pending.wait_for(kSidePatience);
      if (arrived) sum(front);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (arrived && !failure) queue_.pop_front();
    side_is_busy_ = false;
    side_failure_ = failure;
    changed_.notify_all();
    if (failure) return;
  }
}

comm::Site Flights::site(int unit, const char* phase) const {
  return {phase, "reducing gradients of unit '" + units_[unit]->layout().name + "'"};
}

}  // namespace deeptide::gradients
