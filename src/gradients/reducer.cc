// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Fills, sends and sums buckets.
#include "gradients/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "device/unseen.h"

namespace deeptide::gradients {

using at::Tensor;
using device::Role;
using sharding::Parameter;
using sharding::Unit;

namespace {

constexpr std::chrono::milliseconds kServesFor{50};  // to wait for a round before this looks up

/// Returns the source of buckets: the arena, if there is one.
device::BufferPool::Source bucket_source(const host::Exchange* exchange,
                                         const std::shared_ptr<device::Ledger>& ledger) {
  if (exchange == nullptr) return {};
  return [&arena = exchange->arena(), ledger](int64_t bytes, Role role) { return arena.allocate(ledger, role, bytes); };
}

Role role_of(bool buckets_stay) { return buckets_stay ? Role::gradients : Role::communication; }

}  // namespace

Reducer::Reducer(std::vector<Unit*> units, const comm::TeamGroups& groups, std::unique_ptr<host::Exchange> exchange,
                 std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options,
                 sharding::Residency* residency)
    : units_(std::move(units)),
      exchange_(std::move(exchange)),
      num_ranks_(groups.whole().size()),
      own_rank_(world::WorldRank(groups.whole().team().rank())),
      shares_memory_(exchange_ != nullptr && options.together == 1),
      buckets_stay_(gradients::buckets_stay(options, gradients::forecast(options.route(num_ranks_, shares_memory_)))),
      holds_(!device.is_cpu() && buckets_stay_ && num_ranks_ == 1 && exchange_ == nullptr),
      ledger_(ledger),
      pool_(ledger, role_of(buckets_stay_), device, kMaxBucketWaste, bucket_source(exchange_.get(), ledger)),
      options_(options),
      device_(device),
      buckets_(units_.size()),
      residency_(residency),
      sums_(std::make_unique<Sums>(units_, num_ranks_, ledger, device, options)),
      queue_(units_, groups, exchange_.get(), ledger, device, options, pool_, *sums_,
             residency ? &residency->rounds() : nullptr) {
  pool_.reserve(reserved_buffers(sharding::layouts_of(units_), options_, num_ranks_, shares_memory_).buckets);
  for (size_t i = 0; i < units_.size(); ++i) {
    const int unit = static_cast<int>(units_.size() - 1 - i);
    (is_mostly_zero(unit) ? closing_ : order_).push_back(unit);
    buckets_[i].filled.assign(units_[i]->parameters().size(), false);
    buckets_[i].arrived = buckets_[i].added = buckets_[i].seen = buckets_[i].filled;
  }
}

Reducer::~Reducer() = default;

void Reducer::add(int unit, int parameter, Arriving gradient) {
  const device::Unseen unseen;
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  add_to_bucket(buckets_[unit], *units_[unit], parameter, gradient, [this] { attend(); });
  if (!local_ && options_.overlap) issue_complete();
}

void Reducer::add_coming(int unit, int parameter, Arriving gradient) {
  const device::Unseen unseen;
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  add_to_bucket(buckets_[unit], *units_[unit], parameter, gradient, {});
}

void Reducer::add_to_bucket(Bucket& bucket, const Unit& unit, int parameter, Arriving& gradient,
                            const std::function<void()>& meanwhile) {
  const Parameter& p = unit.parameters()[parameter];
  gradient.check(p);
  bucket.added[parameter] = bucket.seen[parameter] = true;
  if (!bucket.arrived[parameter]) {
    bucket.arrived[parameter] = true;
    ++bucket.num_arrived;
  }
  if (hold(bucket, unit, parameter, gradient)) return;
  if (bucket.held) join(bucket, unit, meanwhile);
  if (!bucket.data.defined()) {
    bucket.data = take(unit.numel(), local_ ? options_.accumulate_dtype : options_.reduce_dtype, meanwhile);
  }
  if (!bucket.filled[parameter]) {
    gradient.copy_into(bucket.data, p);
    bucket.filled[parameter] = true;
    return;
  }
  if (bucket.data.scalar_type() != options_.accumulate_dtype) {
    Tensor sum = pool_.take(unit.numel(), options_.accumulate_dtype);
    sum.copy_(bucket.data);
    pool_.put(std::exchange(bucket.data, sum));
  }
  gradient.add_into(bucket.data, p);
}

/// Returns whether the gradient stays where it lies.
bool Reducer::hold(Bucket& bucket, const Unit& unit, int parameter, Arriving& gradient) {
  const Parameter& p = unit.parameters()[parameter];
  if (!holds_ || local_ || bucket.data.defined() || bucket.filled[parameter]) return false;
  if (!bucket.held && !numerics::takes_pieces(device_, unit.parameters().size())) return false;
  if (!HeldGradients::may_hold(gradient.whole(), p, options_.reduce_dtype)) return false;
  if (!bucket.held) bucket.held = std::make_shared<HeldGradients>(ledger_, unit, options_.reduce_dtype, device_);
  bucket.held->add(parameter, gradient.whole());
  bucket.filled[parameter] = true;
  return true;
}

/// Copies what is held into a bucket.
void Reducer::join(Bucket& bucket, const Unit& unit, const std::function<void()>& meanwhile) {
  bucket.data = take(unit.numel(), options_.reduce_dtype, meanwhile);
  bucket.held->copy_into(bucket.data);
  bucket.held.reset();
}

/// Serves the others while this rank waits in backward.
void Reducer::attend() const {
  if (!residency_) return;
  residency_->rounds().announce(begun());
  residency_->attend();
}

void Reducer::before_host_waits() const {
  if (!residency_) return;
  const comm::Rounds& rounds = residency_->rounds();
  while (rounds.launched_by_all() < rounds.awaited()) {
    {
      const std::lock_guard lock(mutex_);
      residency_->rounds().announce(begun());
    }
    residency_->attend_for(kServesFor);
  }
}

void Reducer::end_backward() const {
  if (device_.is_cpu() || num_ranks_ == 1 || !residency_) return;
  const comm::Rounds& rounds = residency_->rounds();
  if (rounds.awaited() <= rounds.launched_by_all()) return;
  const std::lock_guard lock(mutex_);
  residency_->rounds().announce(begun());
  residency_->tell();
}

Tensor Reducer::take(int64_t numel, at::ScalarType dtype, const std::function<void()>& meanwhile) {
  queue_.make_room(numel, dtype, meanwhile);
  return pool_.take(numel, dtype);
}

void Reducer::set_local(bool local) {
  std::lock_guard lock(mutex_);
  local_ = local;
}

bool Reducer::is_local() const {
  std::lock_guard lock(mutex_);
  return local_;
}

bool Reducer::complete(int unit) const {
  return buckets_[unit].num_arrived == static_cast<int>(buckets_[unit].arrived.size());
}

void Reducer::empty(Bucket& bucket) {
  bucket.held.reset();
  pool_.put(std::exchange(bucket.data, Tensor()));
  bucket.filled.assign(bucket.filled.size(), false);
  bucket.arrived.assign(bucket.arrived.size(), false);
  bucket.num_arrived = 0;
}

void Reducer::issue_complete() {
  while (has_next() && complete(order_[next_])) issue_next([this] { attend(); });
  queue_.retire_ready();
}

/// Writes zeros to the unit's bucket where no gradient arrived.
const Tensor& Reducer::filled_bucket(int unit) {
  Bucket& bucket = buckets_[unit];
  const Unit& u = *units_[unit];
  int64_t end = 0;  // of the elements filled so far
  for (size_t i = 0; i < bucket.filled.size(); ++i) {
    const Parameter& p = u.parameters()[i];
    if (!bucket.filled[i]) continue;
    if (end < p.offset) bucket.data.narrow(0, end, p.offset - end).zero_();
    end = p.offset + p.numel;
  }
  if (end < u.numel()) bucket.data.narrow(0, end, u.numel() - end).zero_();
  return bucket.data;
}

/// Returns the unit's bucket in the wire type, with zeros where no gradient arrived; empties the bucket.
Tensor Reducer::outgoing(int unit, const std::function<void()>& meanwhile) {
  Bucket& bucket = buckets_[unit];
  const Unit& u = *units_[unit];
  if (bucket.held) join(bucket, u, meanwhile);
  if (!bucket.data.defined()) return take(u.numel(), options_.reduce_dtype, meanwhile).zero_();
  filled_bucket(unit);
  Tensor data = std::exchange(bucket.data, Tensor());
  empty(bucket);
  if (data.scalar_type() == options_.reduce_dtype) return data;
  Tensor narrow = take(u.numel(), options_.reduce_dtype, meanwhile);
  narrow.copy_(data);
  pool_.put(std::move(data));
  return narrow;
}

/// Sends the next unit of the round under way.
void Reducer::issue_next(const std::function<void()>& meanwhile) {
  if (residency_ && !device_.is_cpu()) residency_->begin_reductions();
  const int unit = order_[next_++];
  if (auto held = buckets_[unit].held) {
    empty(buckets_[unit]);
    queue_.launch(unit, Tensor(), meanwhile, std::move(held));
  } else {
    queue_.launch(unit, outgoing(unit, meanwhile), meanwhile);
  }
  if (next_ < order_.size()) return;
  ++rounds_done_;
  next_ = 0;
}

ReducerForecast Reducer::predicted() const {
  return forecast(sharding::layouts_of(units_), options_, num_ranks_, shares_memory_);
}

int64_t Reducer::rounds_wanted_with(std::vector<bool> coming) {
  {
    std::lock_guard lock(mutex_);
    coming_ = std::move(coming);
  }
  return rounds_wanted();
}

bool Reducer::comes(int unit) const { return !coming_.empty() && coming_[unit]; }

int64_t Reducer::rounds_wanted() const {
  std::lock_guard lock(mutex_);
  // A round sent before the accumulation's boundary moved away still completes; later gradients stay here.
  if (local_) return begun();
  // The round under way takes what waits in units ahead of it; a bucket refilled behind it needs another round.
  bool ahead = next_ > 0, behind = false;
  for (size_t i = 0; i < order_.size(); ++i) {
    if (!comes(order_[i]) && !buckets_[order_[i]].has_any()) continue;
    (i >= next_ ? ahead : behind) = true;
  }
  const int64_t wanted = rounds_done_ + (ahead ? 1 : 0) + (behind ? 1 : 0);
  const bool closes = std::any_of(closing_.begin(), closing_.end(),
                                  [this](int unit) { return comes(unit) || buckets_[unit].has_any(); });
  return std::max<int64_t>(wanted, closes ? 1 : 0);
}

bool Reducer::keep_up(int64_t rounds) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  if (local_ && begun() == 0) return false;  // what accumulates here waits for the boundary, whatever others have begun
  const auto owes = [&] { return rounds_done_ < rounds && has_next() && queue_.has_room(); };
  while (owes() && !comes(order_[next_])) issue_next();
  queue_.retire_ready();
  return owes();
}

void Reducer::end_coming() {
  std::lock_guard lock(mutex_);
  coming_.clear();
}

void Reducer::go_on() {
  at::NoGradGuard no_grad;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) queue_.retire_ready();
}

void Reducer::finish(int64_t rounds, bool ends_micro_batch) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  coming_.clear();
  while (rounds_done_ < rounds && has_next()) issue_next();
  queue_.drain();
  for (size_t i = 0; rounds > 0 && i < closing_.size(); ++i) {
    queue_.reduce_mostly_zero(closing_[i], outgoing(closing_[i]));
  }
  rounds_done_ = 0;
  for (Bucket& bucket : buckets_) {  // remaining buckets wait for the next micro-batch's gradients
    bucket.arrived.assign(bucket.arrived.size(), false);
    if (ends_micro_batch) bucket.added.assign(bucket.added.size(), false);
    bucket.num_arrived = 0;
  }
}

numerics::Contributions Reducer::local_gradient(int unit) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  Bucket& bucket = buckets_[unit];
  if (bucket.held) join(bucket, *units_[unit], {});
  if (!bucket.data.defined()) bucket.data = pool_.take(units_[unit]->numel(), options_.accumulate_dtype);
  return {{filled_bucket(unit)}, options_.scale_of(unit) * units_[unit]->reduce_over().size()};
}

double Reducer::local_squares() {
  at::NoGradGuard no_grad;
  const auto num_units = static_cast<int64_t>(units_.size());
  const Tensor squares = at::zeros({num_units}, at::TensorOptions().dtype(at::kDouble).device(device_));
  for (int unit = 0; unit < static_cast<int>(num_units); ++unit) {
    if (!buckets_[unit].has_any()) continue;
    numerics::ordered_squares(local_gradient(unit), squares.narrow(0, unit, 1));
    squares.narrow(0, unit, 1).div_(static_cast<double>(units_[unit]->reduce_over().size()));
  }
  const double total = squares.sum().item<double>();
  if (!std::isfinite(total)) find_local_bad();
  return total;
}

/// Backward reaches the last unit first.
void Reducer::find_local_bad() {
  for (const int unit : order_) {
    if (!buckets_[unit].has_any()) continue;
    const Tensor gradient = local_gradient(unit).sum();
    const auto found = numerics::find_non_finite({gradient}, gradient);
    if (!found) continue;
    local_bad_ = BadGradient{.unit = units_[unit]->index(), .parameter = 0, .rank = own_rank_};
    const auto& parameters = units_[unit]->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (found->index >= parameters[p].offset) local_bad_->parameter = static_cast<int>(p);
    }
    return;
  }
}

void Reducer::clear_accumulated() {
  std::lock_guard lock(mutex_);
  sums_->clear();
  local_bad_.reset();
  if (local_) {
    for (Bucket& bucket : buckets_) empty(bucket);
  }
  for (Bucket& bucket : buckets_) bucket.seen.assign(bucket.seen.size(), false);
}

void Reducer::release_memory() {
  std::lock_guard lock(mutex_);
  pool_.trim();
  queue_.release_memory();
  sums_->release_memory();
}

void Reducer::set_gradient(int unit, int parameter, int64_t begin, const Tensor& values) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  sums_->overwrite(unit, begin, values);
  buckets_[unit].seen[parameter] = true;
}

void Reducer::drop_gradient(int unit, int parameter) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  const Unit& u = *units_[unit];
  const auto [first, last] = u.owned_range(u.parameters()[parameter]);
  const int64_t begin = first == last ? 0 : first - u.shard_begin();
  sums_->overwrite(unit, begin, at::zeros({last - first}, at::kFloat));
  buckets_[unit].seen[parameter] = false;
}

void Reducer::withhold(int unit, int parameter) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  Bucket& bucket = buckets_[unit];
  if (bucket.held) join(bucket, *units_[unit], {});
  if (bucket.arrived[parameter]) --bucket.num_arrived;
  bucket.filled[parameter] = bucket.arrived[parameter] = bucket.added[parameter] = bucket.seen[parameter] = false;
}

numerics::QuantizationLoss Reducer::take_lost() {
  std::lock_guard lock(mutex_);
  return queue_.take_lost();
}

std::vector<Tensor> Reducer::rounding_errors() {
  std::lock_guard lock(mutex_);
  return queue_.rounding_errors().of_units;
}

void Reducer::set_loss_scale(double loss_scale) {
  std::lock_guard lock(mutex_);
  queue_.rounding_errors().loss_scale = loss_scale;
}

bool Reducer::has_added(int unit, int parameter) const {
  std::lock_guard lock(mutex_);
  return buckets_[unit].added[parameter];
}

bool Reducer::has_added_any() const {
  std::lock_guard lock(mutex_);
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const Bucket& b) { return std::find(b.added.begin(), b.added.end(), true) != b.added.end(); });
}

bool Reducer::has_seen(int unit, int parameter) const {
  std::lock_guard lock(mutex_);
  return buckets_[unit].seen[parameter];
}

std::vector<uint8_t> Reducer::seen() const {
  std::lock_guard lock(mutex_);
  std::vector<uint8_t> all;
  for (const Bucket& bucket : buckets_) all.insert(all.end(), bucket.seen.begin(), bucket.seen.end());
  return all;
}

bool Reducer::has_pending() const {
  std::lock_guard lock(mutex_);
  return rounds_done_ > 0 || next_ > 0 ||
         std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& b) { return b.has_any(); });
}

int64_t Reducer::rounds_begun() const {
  std::lock_guard lock(mutex_);
  return begun();
}

int64_t Reducer::begun() const { return rounds_done_ + (next_ > 0 ? 1 : 0); }

void Reducer::discard(int64_t rounds) {
  {
    std::lock_guard lock(mutex_);
    for (Bucket& bucket : buckets_) empty(bucket);
  }
  finish(rounds);
  clear_accumulated();
}

}  // namespace deeptide::gradients
