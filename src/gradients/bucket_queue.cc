// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Paces what is under way. The thread that has time sums.
#include "gradients/bucket_queue.h"

#include <ATen/core/grad_mode.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/resources.h"
#include "comm/blocking.h"
#include "device/parallel.h"
#include "gradients/forecast.h"
#include "gradients/held_gradients.h"

namespace deeptide::gradients {

using at::Tensor;
using device::Lane;
using device::Role;
using sharding::Unit;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

// A peer that is late (in another branch) must not block this rank's backward: buckets then accumulate instead.
constexpr milliseconds kPatience{500};
constexpr milliseconds kMoment{10};
constexpr milliseconds kSidePatience{20};
constexpr int kSideNice = 10;

/// Returns whether what `wait` waits for comes soon. After a moment it calls `meanwhile` repeatedly: the peer may be in
/// step(), where it goes on only once it knows how far this rank is.
bool is_soon(const std::function<bool(milliseconds)>& wait, const std::function<void()>& meanwhile) {
  if (wait(kMoment)) return true;
  const auto end = steady_clock::now() + kPatience;
  while (steady_clock::now() < end) {
    if (meanwhile) meanwhile();
    if (wait(kMoment)) return true;
  }
  return false;
}

}  // namespace

/// While it lives, the side thread starts no sum; the constructor waits for the current one. Errors: what ended the
/// side thread, each time.
class BucketQueue::Pause {
 public:
  explicit Pause(BucketQueue& queue) : queue_(queue) {
    if (!queue_.side_thread_.joinable()) return;
    comm::run_blocking([&] {
      std::unique_lock lock(queue_.mutex_);
      queue_.side_may_work_ = false;
      queue_.changed_.wait(lock, [&] { return !queue_.side_is_busy_; });
    });
    if (queue_.side_failure_) std::rethrow_exception(queue_.side_failure_);
  }
  ~Pause() {
    if (!queue_.side_thread_.joinable()) return;
    std::lock_guard lock(queue_.mutex_);
    queue_.side_may_work_ = true;
    queue_.changed_.notify_all();
  }

 private:
  BucketQueue& queue_;
};

BucketQueue::BucketQueue(const std::vector<Unit*>& units, comm::TeamGroups groups, host::Exchange* exchange,
                         const std::shared_ptr<device::Ledger>& ledger, at::Device device,
                         const ReducerOptions& options, device::BufferPool& buckets, Sums& sums, comm::Rounds* rounds)
    : units_(units),
      reserves_(options.reserve),
      device_(device),
      groups_(std::move(groups)),
      send_lane_(Lane::create(device)),
      sum_lane_(Lane::create(device)),
      buckets_(buckets),
      arrivals_(ledger, options.keep_rows ? Role::gradients : Role::communication, device, kMaxBucketWaste, {},
                send_lane_),
      sums_(sums),
      rounds_(device.is_cpu() ? nullptr : rounds) {
  const RouteFacts facts = options.route(groups_.whole().size(), exchange != nullptr && options.together == 1);
  for (size_t i = 0; facts.keeps_errors() && i < units_.size(); ++i) {
    const int64_t numel = options.is_mostly_zero(i) ? 0 : units_[i]->numel();
    errors_.of_units.push_back(device::allocate_flat(ledger, Role::communication, numel, at::kFloat, device).zero_());
  }
  const Route::Parts parts{units_, groups_, exchange, buckets, arrivals_, facts.keeps_errors() ? &errors_ : nullptr};
  route_ = make_route(parts, facts);
  if (!options.mostly_zero.empty()) nonzero_route_ = make_nonzero_route(parts, facts);
  if (reserves_) {
    arrivals_.reserve(
        reserved_buffers(sharding::layouts_of(units_), options, groups_.whole().size(), facts.shares_memory).received);
  }
  if (options.side_thread) side_thread_ = start_thread([this] { run_side_thread(); });
}

BucketQueue::~BucketQueue() {
  if (!device_.is_cpu()) order_before_frees();
  if (!side_thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  comm::run_blocking([&] { side_thread_.join(); });
}

void BucketQueue::launch(int unit, Tensor bucket, const std::function<void()>& meanwhile,
                         std::shared_ptr<const HeldGradients> held) {
  limit(meanwhile);
  const RouteForecast& takes = route_->forecast();
  if (reserves_ && takes.arriving > 0) {
    make_room(arrivals_, takes.arriving_numel(units_[unit]->layout()), takes.dtype, meanwhile);
  }
  trace::enter_unit(groups_.whole().recorder(), "backward", groups_.whole().step(), units_[unit]->layout().name);
  Shipment shipment;
  shipment.unit = unit;
  shipment.route = route_.get();
  shipment.bucket = std::move(bucket);
  shipment.held = std::move(held);
  shipment.filled = Lane::current(device_).mark();
  send_lane_.wait_for(shipment.filled);
  {
    const Lane::Scope on_lane(send_lane_);
    route_->start(shipment);
  }
  ++launched_;
  tell_progress();
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(shipment));
  changed_.notify_all();
}

void BucketQueue::reduce_mostly_zero(int unit, Tensor bucket) {
  const Pause pause(*this);
  Shipment shipment;
  shipment.unit = unit;
  shipment.route = nonzero_route_.get();
  shipment.bucket = std::move(bucket);
  nonzero_route_->start(shipment);
  sums_.take(shipment);
}

void BucketQueue::tell_progress() const {
  if (rounds_) rounds_->note_reductions(launched_, retired_);
}

size_t BucketQueue::most_ahead() const { return gradients::most_ahead(units_.size(), route_->forecast()); }

bool BucketQueue::has_room() {
  std::lock_guard lock(mutex_);
  return queue_.size() < most_ahead();
}

void BucketQueue::limit(const std::function<void()>& meanwhile) {
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() < route_->forecast().pace) return;
  }
  const Pause pause(*this);
  if (!device_.is_cpu() || queue_.size() >= most_ahead()) return retire_front(meanwhile);
  retire_soon(meanwhile);
}

void BucketQueue::make_room(int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile) {
  if (!reserves_) return;
  if (LentBuckets* lent = route_->lent()) lent->reclaim();
  make_room(buckets_, numel, dtype, meanwhile);
}

void BucketQueue::make_room(device::BufferPool& pool, int64_t numel, at::ScalarType dtype,
                            const std::function<void()>& meanwhile) {
  if (pool.has(numel, dtype)) return;
  const Pause pause(*this);
  while (!pool.has(numel, dtype) && (retire_soon(meanwhile) || reclaim_soon(meanwhile))) continue;
}

/// Retires the front, if it arrives soon. Returns whether there was one that did.
bool BucketQueue::retire_soon(const std::function<void()>& meanwhile) {
  if (queue_.empty()) return false;
  Shipment& front = queue_.front();
  if (peers_elsewhere_ && !front.pending.ready()) return false;  // waited for once already
  const auto wait = [&](milliseconds limit) {
    route_->go_on();
    return group_of(front).wait_for(front.pending, limit, site(front));
  };
  peers_elsewhere_ = !is_soon(wait, meanwhile);
  if (!peers_elsewhere_) retire_front();
  return !peers_elsewhere_;
}

/// Does for the bucket that was lent first here what retire_soon does.
bool BucketQueue::reclaim_soon(const std::function<void()>& meanwhile) {
  LentBuckets* lent = route_->lent();
  if (lent == nullptr || lent->empty()) return false;
  if (readers_elsewhere_ && !lent->first_is_read()) return false;
  readers_elsewhere_ = !is_soon([&](milliseconds limit) { return lent->wait_for_first(limit); }, meanwhile);
  lent->reclaim();
  return !readers_elsewhere_;
}

void BucketQueue::retire_ready() {
  if (side_thread_.joinable()) return;  // its task
  if (!device_.is_cpu()) return;        // sums wait for what arrives; which bucket is next must not depend on timing
  route_->go_on();
  while (!queue_.empty() && queue_.front().pending.ready()) retire_front();
}

/// Buffers that are dropped have been used on several lanes: puts these uses before the next ones of their memory.
void BucketQueue::order_before_frees() {
  try {
    const Lane current = Lane::current(device_);
    for (Shipment& shipment : queue_) group_of(shipment).order_before(sum_lane_, shipment.pending, site(shipment));
    sum_lane_.wait_for(current.mark());
    send_lane_.wait_for(sum_lane_.mark());
    current.wait_for(send_lane_.mark());
  } catch (const std::exception&) {  // a device or a channel that has failed gives no memory to anybody
  }
}

void BucketQueue::drain() {
  const Pause pause(*this);
  while (!queue_.empty()) retire_front();
  Lane::current(device_).wait_for(sum_lane_.mark());
}

/// Offers of this host go on to the others meanwhile: a bucket behind the one that this rank waits
/// for, too.
void BucketQueue::retire_front(const std::function<void()>& meanwhile) {
  Shipment& shipment = queue_.front();
  const auto go_on_meanwhile = [&] {
    route_->go_on();
    if (meanwhile) meanwhile();
  };
  group_of(shipment).order_before(sum_lane_, shipment.pending, site(shipment),
                                  route_->advances_alone() ? meanwhile : std::function<void()>(go_on_meanwhile));
  ++retired_;
  tell_progress();
  sum_lane_.wait_for(shipment.filled);  // before it, the caller's lane has used what the sum overwrites
  const Lane::Scope on_lane(sum_lane_);
  sums_.take(shipment);
  queue_.pop_front();
  peers_elsewhere_ = false;
}

/// Sums what has arrived. What is late or lost remains for `drain`, which reports it, as it does an exception here.
void BucketQueue::run_side_thread() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kSideNice);
  const RunInline on_this_thread;
  at::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (side_may_work_ && !queue_.empty()); });
    if (stop_) return;
    side_is_busy_ = true;
    Shipment& front = queue_.front();
    lock.unlock();
    bool arrived = false;
    std::exception_ptr failure;
    try {
      route_->go_on();
      arrived = front.pending.wait_for(kSidePatience);
      if (arrived) sums_.take(front);
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

}  // namespace deeptide::gradients
