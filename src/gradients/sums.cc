// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adds rows by pairs; norm and finite check ride along.
#include "gradients/sums.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "gradients/forecast.h"
#include "gradients/held_gradients.h"
#include "numerics/sums/ordered_sum.h"

namespace deeptide::gradients {

using at::Tensor;
using device::Role;
using numerics::Contributions;
using sharding::Unit;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

namespace {

numerics::Squares squares_of(Block block) {
  return block.begin == 0 ? numerics::Squares::begin : numerics::Squares::go_on;
}

}  // namespace

Sums::Sums(const std::vector<Unit*>& units, int num_ranks, std::shared_ptr<device::Ledger> ledger, at::Device device,
           const ReducerOptions& options)
    : units_(units),
      device_(device),
      options_(options),
      ledger_(std::move(ledger)),
      accumulators_(units_.size()),
      kept_at_(units_.size(), -1),
      has_(units_.size(), false),
      sums_of_squares_(
          at::zeros({static_cast<int64_t>(units_.size())}, at::TensorOptions().dtype(at::kDouble).device(device))),
      check_(units_, options_.ordered ? num_ranks : 0, sums_of_squares_, options_.finite_check) {
  if (options_.offload) files_.emplace(*options_.offload, ledger_, Role::gradients, "gradients");
  if (const auto cuts = cuts_of(sharding::layouts_of(units_), options_); !cuts.empty()) {
    cpu_sums_ = std::make_unique<CpuSums>(ledger_, device_, cuts, options_.accumulate_dtype);
  }
  for (int unit = 0; !options_.keep_rows && unit < static_cast<int>(units_.size()); ++unit) {
    if (!leaves(unit)) accumulator(unit);
  }
}

void Sums::take(Shipment& shipment) {
  for (const BadElement& bad : shipment.route->take_bad()) check_.note_element(bad.unit, bad.element, bad.row);
  shipment.route->arrive(shipment);
  if (options_.keep_rows && !has_[shipment.unit]) return keep(shipment);
  add_kept();  // a second one of its unit, which needs the sum now
  add(shipment);
}

void Sums::keep(Shipment& shipment) {
  const int unit = shipment.unit;
  const Contributions rows = contributions(shipment);
  numerics::ordered_squares(rows, squares(unit));
  check_.note(unit, rows, /*first=*/true, *shipment.route, [&] { return rows.sum(); });
  has_[unit] = true;
  kept_at_[unit] = static_cast<int>(kept_.size());
  kept_.push_back(std::move(shipment));
}

void Sums::add_kept() {
  for (Shipment& shipment : std::exchange(kept_, {})) {
    kept_at_[shipment.unit] = -1;
    has_[shipment.unit] = false;
    add(shipment);
  }
}

void Sums::add(Shipment& shipment) {
  const int unit = shipment.unit;
  const Contributions rows = contributions(shipment).joined();
  const bool first = !has_[unit];
  change(unit, first, [&](Block block, const Tensor& sum) {
    const Contributions part = rows.narrow(block.begin, block.count);
    numerics::ordered_sum(part.rows, part.scale, first, sum, squares(unit), squares_of(block));
  });
  check_.note(unit, rows, first, *shipment.route, [&] { return gradient(unit).sum(); });
  has_[unit] = true;
  shipment.route->end(shipment);
}

/// Visits the unit's sum block by block, where the sum is made. `first`: its values are undefined.
void Sums::change(int unit, bool first, const Visit& visit) {
  if (leaves(unit)) {
    return cpu_sums_->change(unit, first, [&](const Tensor& sum) { visit({0, sum.numel()}, sum); });
  }
  const Buffer& total = accumulator(unit);
  for_each_block(total, {0, total.numel()}, [&](Block block) {
    const auto sum = total.lease(block, first ? Access::write : Access::update);
    if (const int64_t next = block.begin + block.count; !first && next < total.numel()) total.prefetch({next, 1});
    visit(block, sum.tensor());
  });
  total.write_behind();
}

const Buffer& Sums::accumulator(int unit) {
  Buffer& shard = accumulators_[unit];
  const int64_t numel = units_[unit]->layout().shard;
  const at::ScalarType dtype = options_.accumulate_dtype;
  if (!shard.defined()) {
    shard = files_ ? files_->place(numel, options_.stays_of(static_cast<size_t>(unit), numel), dtype)
                   : Buffer::resident(device::allocate_flat(ledger_, Role::gradients, numel, dtype, device_));
  }
  return shard;
}

UnitGradient Sums::gradient(int unit) {
  if (kept_at_[unit] >= 0) return contributions(kept_[kept_at_[unit]]);
  return leaves(unit) ? cpu_sums_->gradient(unit) : UnitGradient(accumulator(unit));
}

UnitGradient Sums::gradient_on_device(int unit) {
  return leaves(unit) ? UnitGradient(cpu_sums_->lend(unit)) : gradient(unit);
}

void Sums::prefetch(int unit, int64_t element) const {
  const Buffer& sums = accumulators_[unit];
  if (sums.defined() && element < sums.numel()) sums.prefetch({element, 1});
}

Contributions Sums::contributions(const Shipment& shipment) const {
  const double scale = options_.scale_of(shipment.unit);
  if (shipment.held) return {shipment.held->pieces(), units_[shipment.unit]->numel(), scale};
  return {shipment.route->rows(shipment), scale};
}

double Sums::sum_of_squares(const FiniteCheck::Read& read) {
  const double total = check_.total(has_, read);
  if (!std::isfinite(total)) check_.find(has_, [this](int unit) { return gradient(unit).sum(); });
  return total;
}

bool Sums::has_any() const { return std::find(has_.begin(), has_.end(), true) != has_.end(); }

void Sums::overwrite(int unit, int64_t begin, const Tensor& values) {
  add_kept();
  const int64_t end = begin + values.numel();
  const bool first = !has_[unit];
  change(unit, first, [&](Block block, const Tensor& sum) {
    if (first) sum.zero_();
    const int64_t from = std::max(begin, block.begin), to = std::min(end, block.end());
    if (from < to) sum.narrow(0, from - block.begin, to - from).copy_(values.narrow(0, from - begin, to - from));
    numerics::ordered_squares(sum, squares(unit), squares_of(block));
  });
  has_[unit] = true;
  check_.note_overwritten(unit, [&] { return gradient(unit).sum(); });
}

void Sums::clear() {
  for (Shipment& shipment : std::exchange(kept_, {})) shipment.route->end(shipment);
  kept_at_.assign(kept_at_.size(), -1);
  has_.assign(has_.size(), false);
  check_.clear();
}

/// Sums in files take none.
void Sums::release_memory() {
  if (!files_) accumulators_.assign(accumulators_.size(), Buffer());
  if (cpu_sums_) cpu_sums_->release_memory();
}

}  // namespace deeptide::gradients
