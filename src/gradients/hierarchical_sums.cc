// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Offers buckets to a host's ranks, sums its own rows of all of theirs, and exchanges the sums between hosts.
#include "gradients/hierarchical_sums.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/invariant.h"
#include "device/unseen.h"
#include "numerics/ordered_sum.h"

namespace deeptide::gradients {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

int64_t summed_together(int64_t ranks_per_host, at::ScalarType dtype) {
  const int64_t together = ranks_per_host & -ranks_per_host;
  const bool saves = together * static_cast<int64_t>(c10::elementSize(dtype)) > static_cast<int64_t>(sizeof(float));
  return saves ? together : 1;
}

/// First within the host, then between hosts. Earlier sums are sent first, whoever asks.
class HierarchicalSums::Sum : public host::Operation {
 public:
  Sum(HierarchicalSums& owner, int unit, Tensor bucket, Tensor memory, host::Exchange::Offer offer)
      : owner_(owner), unit_(unit), bucket_(std::move(bucket)), memory_(std::move(memory)), offer_(std::move(offer)) {}

  bool ready() override {
    owner_.go_on();
    return rail_ && rail_->ready();
  }
  bool advance(milliseconds limit) override { return owner_.wait_for(*this, limit) && rail_->advance(limit); }

 private:
  friend class HierarchicalSums;

  HierarchicalSums& owner_;
  int unit_;
  Tensor bucket_;
  Tensor memory_;
  host::Exchange::Offer offer_;
  host::OperationPtr rail_;  // null: not sent yet
};

HierarchicalSums::HierarchicalSums(comm::Group& group, host::Exchange& exchange, int64_t together, Hooks hooks)
    : group_(group),
      exchange_(exchange),
      per_host_(exchange.size()),
      own_host_(group.index() / per_host_),
      own_index_(group.index() % per_host_),
      together_(together),
      hooks_(std::move(hooks)) {
  DEEPTIDE_INVARIANT(group.rail() != nullptr && per_host_ % together == 0, "sums of ", together, " of ", per_host_,
                     " ranks per host over transport '", group.path(), "'");
}

comm::Pending HierarchicalSums::start(int unit, Tensor bucket, Tensor memory) {
  auto offer = exchange_.offer(bucket);
  const auto bytes = static_cast<int64_t>(bucket.nbytes()), crossing = static_cast<int64_t>(memory.nbytes()) / 2;
  const int64_t num_hosts = group_.size() / per_host_;
  auto sum = std::make_shared<Sum>(*this, unit, std::move(bucket), std::move(memory), std::move(offer));
  {
    std::lock_guard lock(mutex_);
    offered_.push_back(sum);
  }
  const int64_t within = bytes / per_host_ * (per_host_ - 1), between = crossing / num_hosts * (num_hosts - 1);
  return group_.track(std::move(sum), "reduce-scatter", bytes, within + between);
}

HierarchicalSums::Sum* HierarchicalSums::front() {
  std::lock_guard lock(mutex_);
  return offered_.empty() ? nullptr : offered_.front().get();
}

void HierarchicalSums::go_on() {
  for (Sum* sum = front(); sum != nullptr && sum->offer_.operation->ready(); sum = front()) send(*sum);
}

/// Returns whether the sum has been sent. Errors: TransportError.
bool HierarchicalSums::wait_for(Sum& sum, milliseconds limit) {
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
void HierarchicalSums::send(Sum& sum) {
  const device::Unseen unseen;
  at::NoGradGuard no_grad;
  const int64_t half = sum.memory_.numel() / 2, shard = half / num_rows(), ranks = group_.size();
  const Tensor leaves = sum.memory_.narrow(0, 0, half), arrives = sum.memory_.narrow(0, half, half);
  const Tensor squares = at::empty({1}, at::kDouble);
  for (int64_t row = 0; row < num_rows(); ++row) {
    const int64_t first = row * together_, owner = first / per_host_ * per_host_ + own_index_;
    DEEPTIDE_INVARIANT(owner < ranks, "row ", row, " of ", num_rows());
    const auto all = exchange_.rows(sum.offer_.number, owner * shard, shard, sum.bucket_.scalar_type());
    const int64_t neighbour = first % per_host_;
    const std::vector<Tensor> rows(all.begin() + neighbour, all.begin() + neighbour + together_);
    const Tensor total = leaves.narrow(0, row * shard, shard);
    numerics::ordered_sum(rows, 1.0, /*overwrite=*/true, total, squares);
    if (!std::isfinite(squares.item<double>())) {
      const auto found = numerics::find_non_finite(rows, total);
      const int64_t rank = own_host_ * per_host_ + neighbour + (found ? found->rank : 0);
      const bool named = found && found->rank >= 0;
      if (found) hooks_.note({sum.unit_, owner * shard + found->index, named ? static_cast<int>(rank) : -1});
    }
  }
  hooks_.lend(std::exchange(sum.bucket_, Tensor()), sum.offer_.number);
  sum.rail_ = group_.rail()->all_to_all(arrives, leaves, comm::OwnRow::left);
  std::lock_guard lock(mutex_);
  offered_.pop_front();
}

std::vector<Tensor> HierarchicalSums::rows(const Tensor& memory) const {
  const int64_t half = memory.numel() / 2, shard = half / num_rows();
  std::vector<Tensor> rows;
  for (int64_t row = 0; row < num_rows(); ++row) {
    const bool stayed = row * together_ / per_host_ == own_host_;
    rows.push_back(memory.narrow(0, (stayed ? 0 : half) + row * shard, shard));
  }
  return rows;
}

}  // namespace deeptide::gradients
