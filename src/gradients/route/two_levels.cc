// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The reduce-scatter of several hosts with several ranks each: neighbours on one host are summed there, through shared
// memory, and only their sums cross the network.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>
#include <utility>

#include "base/invariant.h"
#include "device/unseen.h"
#include "gradients/route/route.h"
#include "numerics/sums/ordered_sum.h"

namespace deeptide::gradients {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

/// Rows arrive in the order of ranks: each is the sum of `together` of them. The group is over hosts of equally many
/// ranks, numbered host by host; its transport has a rail.
class TwoLevelRoute : public Route {
 public:
  TwoLevelRoute(const Parts& parts, const RouteFacts& facts)
      : Route(parts, facts),
        exchange_(*parts.exchange),
        lent_(exchange_, parts.buckets),
        per_host_(exchange_.size()),
        own_host_(parts.groups.whole().index() / per_host_),
        own_index_(parts.groups.whole().index() % per_host_) {
    DEEPTIDE_INVARIANT(parts.groups.whole().rail() != nullptr && per_host_ % facts.together == 0, "sums of ",
                       facts.together, " of ", per_host_, " ranks per host over transport '",
                       parts.groups.whole().path(), "'");
  }

  void start(Shipment& shipment) override;
  /// Sums and sends, in their order, what all ranks of the host have offered.
  void go_on() override;
  bool advances_alone() const override { return false; }
  std::vector<Tensor> rows(const Shipment& shipment) const override;
  world::TeamIndex sender(int /*row*/) const override { return world::TeamIndex::none; }
  std::vector<BadElement> take_bad() override { return std::exchange(bad_, {}); }
  void end(Shipment& shipment) override { parts_.arrivals.put(std::move(shipment.arrived)); }
  LentBuckets* lent() override { return &lent_; }

 private:
  class Sum;

  bool wait_for(Sum& sum, milliseconds limit);
  void send(Sum& sum);
  void sum_row(const Sum& sum, int64_t row, const Tensor& total, const Tensor& squares);
  Sum* front();
  int64_t num_rows() const { return facts_.num_ranks / facts_.together; }

  host::Exchange& exchange_;
  LentBuckets lent_;
  int64_t per_host_;  // ranks
  int64_t own_host_;
  int64_t own_index_;
  std::vector<BadElement> bad_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Sum>> offered_;  // but not sent yet
};

/// First within the host, then between hosts. Earlier sums are sent first, whoever asks.
class TwoLevelRoute::Sum : public host::Operation {
 public:
  Sum(TwoLevelRoute& owner, int unit, Tensor bucket, Tensor memory, host::Exchange::Offer offer)
      : owner_(owner), unit_(unit), bucket_(std::move(bucket)), memory_(std::move(memory)), offer_(std::move(offer)) {}

  bool ready() override {
    owner_.go_on();
    return rail_ && rail_->ready();
  }
  bool advance(milliseconds limit) override { return owner_.wait_for(*this, limit) && rail_->advance(limit); }

 private:
  friend class TwoLevelRoute;

  TwoLevelRoute& owner_;
  int unit_;
  Tensor bucket_;
  Tensor memory_;
  host::Exchange::Offer offer_;
  host::OperationPtr rail_;  // null: not sent yet
};

void TwoLevelRoute::start(Shipment& shipment) {
  take_arrival(shipment);
  auto offer = exchange_.offer(shipment.bucket);
  const auto bytes = static_cast<int64_t>(shipment.bucket.nbytes()),
             crossing = static_cast<int64_t>(shipment.arrived.nbytes()) / 2;
  const int64_t num_hosts = facts_.num_ranks / per_host_;
  auto sum = std::make_shared<Sum>(*this, shipment.unit, std::exchange(shipment.bucket, Tensor()), shipment.arrived,
                                   std::move(offer));
  {
    std::lock_guard lock(mutex_);
    offered_.push_back(sum);
  }
  const int64_t within = bytes / per_host_ * (per_host_ - 1), between = crossing / num_hosts * (num_hosts - 1);
  shipment.pending = group().track(std::move(sum), "reduce-scatter", bytes, within + between);
}

TwoLevelRoute::Sum* TwoLevelRoute::front() {
  std::lock_guard lock(mutex_);
  return offered_.empty() ? nullptr : offered_.front().get();
}

void TwoLevelRoute::go_on() {
  for (Sum* sum = front(); sum != nullptr && sum->offer_.operation->ready(); sum = front()) send(*sum);
}

/// Returns whether the sum has been sent. Errors: TransportError.
bool TwoLevelRoute::wait_for(Sum& sum, milliseconds limit) {
  const auto end = steady_clock::now() + limit;
  while (!sum.rail_) {
    Sum* first = front();
    const auto left = std::chrono::ceil<milliseconds>(end - steady_clock::now());
    if (!first->offer_.operation->advance(std::max(left, milliseconds(0)))) return false;
    send(*first);
  }
  return true;
}

/// Sums what the host's ranks contribute to the shards of this rank's index on every host, and sends it there.
void TwoLevelRoute::send(Sum& sum) {
  const device::Unseen unseen;
  at::NoGradGuard no_grad;
  const int64_t half = sum.memory_.numel() / 2, shard = half / num_rows();
  const Tensor leaves = sum.memory_.narrow(0, 0, half), arrives = sum.memory_.narrow(0, half, half);
  const Tensor squares = at::empty({1}, at::kDouble);
  for (int64_t row = 0; row < num_rows(); ++row) sum_row(sum, row, leaves.narrow(0, row * shard, shard), squares);
  lent_.lend(std::exchange(sum.bucket_, Tensor()), sum.offer_.number);
  sum.rail_ = group().rail()->all_to_all(arrives, leaves, comm::OwnRow::left);
  std::lock_guard lock(mutex_);
  offered_.pop_front();
}

void TwoLevelRoute::sum_row(const Sum& sum, int64_t row, const Tensor& total, const Tensor& squares) {
  const int64_t first = row * facts_.together, owner = first / per_host_ * per_host_ + own_index_;
  DEEPTIDE_INVARIANT(owner < facts_.num_ranks, "row ", row, " of ", num_rows());
  const int64_t begin = owner * total.numel(), neighbour = first % per_host_;
  const auto all = exchange_.rows(sum.offer_.number, begin, total.numel(), sum.bucket_.scalar_type());
  const std::vector<Tensor> rows(all.begin() + neighbour, all.begin() + neighbour + facts_.together);
  numerics::ordered_sum(rows, 1.0, /*overwrite=*/true, total, squares);
  if (std::isfinite(squares.item<double>())) return;
  const auto found = numerics::find_non_finite(rows, total);
  if (!found) return;
  const int64_t rank = own_host_ * per_host_ + neighbour + found->rank;
  bad_.push_back({sum.unit_, begin + found->index, found->rank >= 0 ? world::TeamIndex(rank) : world::TeamIndex::none});
}

std::vector<Tensor> TwoLevelRoute::rows(const Shipment& shipment) const {
  const int64_t half = shipment.arrived.numel() / 2, shard = half / num_rows();
  std::vector<Tensor> rows;
  for (int64_t row = 0; row < num_rows(); ++row) {
    const bool stayed = row * facts_.together / per_host_ == own_host_;
    rows.push_back(shipment.arrived.narrow(0, (stayed ? 0 : half) + row * shard, shard));
  }
  return rows;
}

}  // namespace

std::unique_ptr<Route> make_two_level_route(const Route::Parts& parts, const RouteFacts& facts) {
  return std::make_unique<TwoLevelRoute>(parts, facts);
}

/// A bucket leaves, then one arrives. A neighbour may have to read one bucket more.
RouteForecast forecast_two_levels(const RouteFacts& facts) { return {.lent = 1, .arriving = 2, .of = facts.together}; }

int64_t summed_together(int64_t ranks_per_host, at::ScalarType dtype) {
  const int64_t together = ranks_per_host & -ranks_per_host;
  const bool saves = together * static_cast<int64_t>(c10::elementSize(dtype)) > static_cast<int64_t>(sizeof(float));
  return saves ? together : 1;
}

}  // namespace deeptide::gradients
