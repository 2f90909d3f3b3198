// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Filling, sending and summing buckets.
#include "gradients/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/unseen.h"
#include "gradients/ordered_sum.h"

namespace deeptide::gradients {

using at::Tensor;
using device::Role;
using sharding::Parameter;
using sharding::Unit;

namespace {

// A peer that does not come (another branch) must not block this rank's backward: buckets then pile up instead.
constexpr std::chrono::milliseconds kFlightPatience{500};

/// The gradient's place in the bucket takes it, with cast. Without ATen where a plain copy does: models of many small
/// parameters come here for each.
void copy_into(const Tensor& bucket, const Parameter& p, const Tensor& gradient) {
  const auto place = [&] { return static_cast<char*>(bucket.mutable_data_ptr()) + p.offset * bucket.element_size(); };
  if (gradient.is_cpu() && gradient.scalar_type() == bucket.scalar_type() && gradient.is_contiguous() &&
      !gradient.is_neg() && gradient.numel() == p.numel) {
    std::memcpy(place(), gradient.const_data_ptr(), gradient.nbytes());
  } else {
    p.view_of(bucket).copy_(gradient);
  }
}

/// Where buckets come from: the arena, if there is one.
device::BufferPool::Source bucket_source(const comm::HostExchange* exchange,
                                         const std::shared_ptr<device::Ledger>& ledger) {
  if (exchange == nullptr) return {};
  return [&arena = exchange->arena(), ledger](int64_t bytes) {
    return arena.allocate(ledger, Role::communication, bytes);
  };
}

}  // namespace

Reducer::Reducer(std::vector<Unit*> units, comm::Group& group, std::unique_ptr<comm::HostExchange> exchange,
                 std::shared_ptr<device::Ledger> ledger, at::Device device, const ReducerOptions& options)
    : units_(std::move(units)),
      group_(group),
      exchange_(std::move(exchange)),
      ledger_(ledger),
      buckets_pool_(ledger, Role::communication, device, /*max_waste=*/2, bucket_source(exchange_.get(), ledger)),
      receive_pool_(ledger, Role::communication, device),
      options_(options),
      buckets_(units_.size()),
      accumulated_(units_.size(), false),
      sums_of_squares_(
          at::zeros({static_cast<int64_t>(units_.size())}, at::TensorOptions().dtype(at::kDouble).device(device))) {
  for (size_t i = 0; i < units_.size(); ++i) {
    order_.push_back(static_cast<int>(units_.size() - 1 - i));
    buckets_[i].filled.assign(units_[i]->parameters().size(), false);
    buckets_[i].arrived = buckets_[i].filled;
    accumulators_.push_back(
        device::allocate_flat(ledger_, Role::gradients, units_[i]->layout().shard, at::kFloat, device));
  }
}

Reducer::~Reducer() = default;

void Reducer::add(int unit, int parameter, const Tensor& gradient) {
  const device::Unseen unseen;
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  add_to_bucket(buckets_[unit], *units_[unit], parameter, gradient);
  if (!local_ && options_.overlap) issue_complete();
}

void Reducer::add_to_bucket(Bucket& bucket, const Unit& unit, int parameter, const Tensor& gradient) {
  const Parameter& p = unit.parameters()[parameter];
  TORCH_CHECK_VALUE(gradient.layout() == at::kStrided, "deeptide: parameter '", p.name,
                    "' received a sparse gradient, which is not supported yet; build its embedding with sparse=False");
  if (!bucket.data.defined()) {
    bucket.data = buckets_pool_.take(unit.numel(), local_ ? at::kFloat : options_.reduce_dtype);
  }
  if (!bucket.arrived[parameter]) {
    bucket.arrived[parameter] = true;
    ++bucket.num_arrived;
  }
  if (!bucket.filled[parameter]) {
    copy_into(bucket.data, p, gradient);
    bucket.filled[parameter] = true;
    return;
  }
  if (bucket.data.scalar_type() != at::kFloat) {  // sums are taken in fp32
    Tensor wide = buckets_pool_.take(unit.numel(), at::kFloat);
    wide.copy_(bucket.data);
    buckets_pool_.put(std::exchange(bucket.data, wide));
  }
  p.view_of(bucket.data).add_(gradient);
}

void Reducer::set_local(bool local) {
  std::lock_guard lock(mutex_);
  local_ = local;
}

bool Reducer::complete(int unit) const {
  return buckets_[unit].num_arrived == static_cast<int>(buckets_[unit].arrived.size());
}

void Reducer::empty(Bucket& bucket) {
  buckets_pool_.put(std::exchange(bucket.data, Tensor()));
  bucket.filled.assign(bucket.filled.size(), false);
  bucket.arrived.assign(bucket.arrived.size(), false);
  bucket.num_arrived = 0;
}

void Reducer::issue_complete() {
  while (next_ < order_.size() && complete(order_[next_])) {
    issue(static_cast<int>(next_++));
    if (next_ == order_.size()) {
      ++rounds_done_;
      next_ = 0;
    }
  }
  while (!flights_.empty() && flights_.front().pending.ready()) retire_front();
}

/// The unit's bucket in the wire's type with zeros wherever no gradient came; the bucket is empty afterwards.
Tensor Reducer::outgoing(int unit) {
  Bucket& bucket = buckets_[unit];
  const Unit& u = *units_[unit];
  if (!bucket.data.defined()) return buckets_pool_.take(u.numel(), options_.reduce_dtype).zero_();
  int64_t end = 0;  // of what is filled so far
  for (size_t i = 0; i < bucket.filled.size(); ++i) {
    const Parameter& p = u.parameters()[i];
    if (!bucket.filled[i]) continue;
    bucket.data.narrow(0, end, p.offset - end).zero_();
    end = p.offset + p.numel;
  }
  bucket.data.narrow(0, end, u.numel() - end).zero_();
  Tensor data = std::exchange(bucket.data, Tensor());
  empty(bucket);
  if (data.scalar_type() == options_.reduce_dtype) return data;
  Tensor narrow = buckets_pool_.take(u.numel(), options_.reduce_dtype);
  narrow.copy_(data);
  buckets_pool_.put(std::move(data));
  return narrow;
}

void Reducer::issue(int position) {
  const int unit = order_[position];
  const Unit& u = *units_[unit];
  limit_flights();
  Flight flight;
  flight.unit = unit;
  flight.sent = outgoing(unit);
  if (exchange_) {
    auto offer = exchange_->offer(flight.sent);
    flight.pending = std::move(offer.pending);
    flight.offer = offer.number;
  } else if (group_.size() > 1 && options_.ordered) {
    flight.received = receive_pool_.take(u.numel(), options_.reduce_dtype);
    flight.pending = group_.all_to_all(flight.received, flight.sent);
  } else if (group_.size() > 1) {
    flight.received = receive_pool_.take(u.layout().shard, options_.reduce_dtype);
    flight.pending = group_.reduce_scatter(flight.received, flight.sent);
  }
  flights_.push_back(std::move(flight));
}

/// What there is to sum for this rank's shard, by rank.
std::vector<Tensor> Reducer::rows(const Flight& flight) const {
  const Unit& u = *units_[flight.unit];
  const int64_t shard = u.layout().shard;
  if (exchange_) return exchange_->rows(flight.offer, u.shard_begin(), shard, options_.reduce_dtype);
  const Tensor& flat = flight.received.defined() ? flight.received : flight.sent;
  std::vector<Tensor> rows;
  for (int64_t begin = 0; begin < flat.numel(); begin += shard) rows.push_back(flat.narrow(0, begin, shard));
  if (rows.empty()) rows.push_back(flat);
  return rows;
}

void Reducer::give_back(Flight& flight) {
  receive_pool_.put(std::move(flight.received));
  if (!exchange_) {
    buckets_pool_.put(std::move(flight.sent));
    return;
  }
  exchange_->set_read(flight.offer);
  lent_.push_back({std::move(flight.sent), flight.offer});
  reclaim();
}

/// Buckets that everybody has read may be filled again.
void Reducer::reclaim() {
  while (!lent_.empty() && exchange_->all_read(lent_.front().offer)) {
    buckets_pool_.put(std::move(lent_.front().sent));
    lent_.pop_front();
  }
}

void Reducer::limit_flights() {
  if (flights_.size() < kMaxFlights) return;
  Flight& front = flights_.front();
  if (peers_elsewhere_ && !front.pending.ready()) return;  // waited for once already
  peers_elsewhere_ = !group_.wait_for(front.pending, kFlightPatience, site(front.unit));
  if (!peers_elsewhere_) retire_front();
}

void Reducer::retire_front() {
  Flight& flight = flights_.front();
  group_.wait(flight.pending, site(flight.unit));
  const int unit = flight.unit;
  const auto contributions = rows(flight);
  const Tensor square = sums_of_squares_.narrow(0, unit, 1);
  ordered_sum(contributions, options_.scale, !accumulated_[unit], accumulators_[unit], square);
  accumulated_[unit] = true;
  has_accumulated_ = true;
  if (!bad_ && !std::isfinite(square.item<double>())) record_bad(unit, contributions);
  give_back(flight);
  flights_.pop_front();
  peers_elsewhere_ = false;
}

void Reducer::record_bad(int unit, at::TensorList rows) {
  const Unit& u = *units_[unit];
  const auto found = find_non_finite(rows, accumulators_[unit]);
  if (!found) return;
  const int64_t at = u.shard_begin() + found->index;
  bad_ = BadGradient{"", options_.ordered ? found->rank : -1};
  for (const Parameter& p : u.parameters()) {
    if (at >= p.offset) bad_->parameter = p.name;
  }
}

int64_t Reducer::rounds_wanted() const {
  std::lock_guard lock(mutex_);
  if (local_) return 0;
  // The round under way takes what waits in units it has not passed; a bucket filled again behind it needs one more.
  bool ahead = next_ > 0, behind = false;
  for (size_t i = 0; i < order_.size(); ++i) {
    if (!buckets_[order_[i]].data.defined()) continue;
    (i >= next_ ? ahead : behind) = true;
  }
  return rounds_done_ + (ahead ? 1 : 0) + (behind ? 1 : 0);
}

void Reducer::finish(int64_t rounds) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  while (rounds_done_ < rounds) {
    issue(static_cast<int>(next_++));
    if (next_ == order_.size()) {
      ++rounds_done_;
      next_ = 0;
    }
    while (flights_.size() > kMaxFlights) retire_front();
  }
  while (!flights_.empty()) retire_front();
  rounds_done_ = 0;
  for (Bucket& bucket : buckets_) {  // what stayed here waits for the next micro-batch's gradients
    bucket.arrived.assign(bucket.arrived.size(), false);
    bucket.num_arrived = 0;
  }
}

double Reducer::sum_of_squares() const {
  std::lock_guard lock(mutex_);
  double total = 0.0;
  const Tensor squares = sums_of_squares_.cpu();
  for (size_t i = 0; i < units_.size(); ++i) {
    if (accumulated_[i]) total += squares.const_data_ptr<double>()[i];
  }
  return total;
}

void Reducer::clear_accumulated() {
  std::lock_guard lock(mutex_);
  accumulated_.assign(accumulated_.size(), false);
  has_accumulated_ = false;
  bad_.reset();
}

bool Reducer::has_pending() const {
  std::lock_guard lock(mutex_);
  return rounds_done_ > 0 || next_ > 0 ||
         std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& b) { return b.data.defined(); });
}

int64_t Reducer::rounds_begun() const {
  std::lock_guard lock(mutex_);
  return rounds_done_ + (next_ > 0 ? 1 : 0);
}

void Reducer::discard(int64_t rounds) {
  {
    std::lock_guard lock(mutex_);
    for (Bucket& bucket : buckets_) empty(bucket);
  }
  finish(rounds);
  clear_accumulated();
}

comm::Site Reducer::site(int unit) const {
  return {step_, "backward", "reducing gradients of unit '" + units_[unit]->layout().name + "'"};
}

}  // namespace deeptide::gradients
