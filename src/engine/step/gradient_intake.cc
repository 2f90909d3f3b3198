// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Takes gradients in, in the order of the parameter's elements.
#include "engine/step/gradient_intake.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include "base/interrupt.h"
#include "base/log.h"

namespace deeptide::engine {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

namespace {

/// Returns the gradient of one of the parameter's tensors with the sizes and the order of its first.
Tensor in_order_of_first(const Parameter& p, int tensor, const Tensor& gradient) {
  const sharding::Order first = p.order_of(0), own = p.order_of(tensor);
  if (own.sizes == first.sizes && own.strides == first.strides) return gradient;
  const Tensor dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  Tensor ordered = at::empty(first.sizes, dense.options());
  at::as_strided(ordered, own.sizes, own.strides, 0).copy_(dense);
  return ordered;
}

}  // namespace

GradientIntake::GradientIntake(std::vector<Unit*> trainable, gradients::Reducer& reducer, bool speaks,
                               std::function<void()> before)
    : units_(std::move(trainable)), reducer_(reducer), passes_(speaks) {
  std::vector<Tensor> tensors;
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    for (int p = 0; p < static_cast<int>(units_[u]->parameters().size()); ++p) {
      const auto& all = units_[u]->parameters()[p].tensors;
      for (int t = 0; t < static_cast<int>(all.size()); ++t) {
        if (!all[t].requires_grad()) continue;  // a frozen name of a tied parameter
        index_of_[all[t].unsafeGetTensorImpl()] = static_cast<int>(tensors.size());
        tensors.push_back(all[t]);
        places_.push_back({u, p, t});
      }
    }
  }
  replaced_.resize(places_.size(), false);
  passes_.expect(places_.size());
  const std::string dropped = drop_left();
  if (!dropped.empty()) {
    log(LogLevel::warning, "parameter '" + dropped +
                               "' had a .grad before initialize; it is dropped, as are all such: the first step uses "
                               "gradients of backward passes from now on");
  }
  hooks_ = std::make_unique<gradients::GradientHooks>(
      tensors,
      [this](int index, const Tensor& gradient) {
        refuse_in_interrupt_handler("backward()");
        arrive(index, gradient);
      },
      std::move(before));
}

void GradientIntake::arrive(int index, const Tensor& gradient) {
  const bool is_own = scaled_ > 0;
  passes_.note_gradient(index, is_own);
  const double scale = is_own ? 1.0 : loss_scale_.load();
  const Tensor taken = ordered_and_scaled(index, gradient, scale);
  if (held_ != nullptr) {
    held_->push_back({index, taken});
    return;
  }
  add(index, taken);
}

void GradientIntake::add(int index, const Tensor& gradient) {
  const Place& place = places_[index];
  auto joining = joining_.extract(index);
  // Not by one tensor for both: a further reference to a gradient has it copied, see HeldGradients::may_hold.
  if (joining.empty()) return reducer_.add(place.unit, place.parameter, gradient);
  reducer_.add(place.unit, place.parameter, joining.mapped().add_(gradient));
}

void GradientIntake::hold(std::optional<int64_t> number) {
  held_ = number ? &waiting_[*number] : nullptr;
  if (held_ != nullptr) held_->clear();
}

void GradientIntake::give(int64_t number) {
  auto given = waiting_.extract(number);
  if (given.empty()) return;
  for (const Waiting& each : given.mapped()) add(each.index, each.gradient);
}

bool GradientIntake::join(const Tensor& weight, const Tensor& sum) {
  const auto found = index_of_.find(weight.unsafeGetTensorImpl());
  if (found == index_of_.end() || sum.scalar_type() == weight.scalar_type() || hooks_->is_watched(found->second)) {
    return false;
  }
  const Place& place = places_[found->second];
  const Tensor ordered = in_order_of_first(parameter(place), place.tensor, sum);
  auto [held, is_new] = joining_.emplace(found->second, ordered);
  if (!is_new) held->second = held->second + ordered;
  return true;
}

void GradientIntake::take_joining() {
  for (const auto& [index, sum] : joining_) reducer_.add(places_[index].unit, places_[index].parameter, sum);
  joining_.clear();
}

bool GradientIntake::take_product(const Tensor& weight, const gradients::Product& product) {
  const auto found = index_of_.find(weight.unsafeGetTensorImpl());
  if (found == index_of_.end() || !hooks_->is_alone(found->second)) return false;
  const Place& place = places_[found->second];
  const sharding::Order order = parameter(place).order_of(0);
  if (place.tensor != 0 || order.sizes != std::vector{product.left.size(0), product.right.size(1)}) return false;
  if (const auto joining = joining_.extract(found->second)) {
    reducer_.add_coming(place.unit, place.parameter, joining.mapped());
  }
  reducer_.add(place.unit, place.parameter, product);
  return true;
}

/// Returns the gradient of a place as the reducer takes it: in the order of the parameter's first tensor, times
/// `scale`.
Tensor GradientIntake::ordered_and_scaled(int index, const Tensor& gradient, double scale) const {
  const Place& place = places_[index];
  const Tensor ordered = in_order_of_first(parameter(place), place.tensor, gradient);
  return scale == 1.0 ? ordered : ordered.to(at::kFloat).mul_(scale);
}

std::string GradientIntake::take_mixture() {
  const int index = passes_.take_mixture();
  return index < 0 ? std::string() : parameter(places_[static_cast<size_t>(index)]).name;
}

std::vector<uint8_t> GradientIntake::drop(const std::vector<Tensor>& tensors) {
  std::vector<std::vector<uint8_t>> by_unit;
  for (const Unit* unit : units_) by_unit.emplace_back(unit->parameters().size(), 0);
  for (const Tensor& tensor : tensors) {
    if (const auto place = place_of(tensor)) by_unit[place->first][place->second] = 1;
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (by_unit[place.unit][place.parameter] == 0) continue;
    tensor(place).mutable_grad().reset();
    reducer_.withhold(place.unit, place.parameter);
    passes_.forget(static_cast<int>(i));
  }
  std::vector<uint8_t> all;
  for (const auto& unit : by_unit) all.insert(all.end(), unit.begin(), unit.end());
  return all;
}

std::optional<std::pair<int, int>> GradientIntake::place_of(const Tensor& tensor) const {
  const auto found = index_of_.find(tensor.unsafeGetTensorImpl());
  if (found == index_of_.end()) return std::nullopt;
  return std::pair(places_[found->second].unit, places_[found->second].parameter);
}

void GradientIntake::follow() {
  const std::vector<bool> now = hooks_->follow();
  for (size_t i = 0; i < places_.size(); ++i) replaced_[i] = replaced_[i] || now[i];
}

std::vector<bool> GradientIntake::check_left() {
  follow();
  std::vector<bool> units(units_.size(), false);
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (!tensor(place).grad().defined()) continue;
    gradients::check_layout(parameter(place), tensor(place).grad());
    TORCH_CHECK_VALUE(
        replaced_[i] || !reducer_.has_added(place.unit, place.parameter), "parameter '", parameter(place).name,
        "' has a .grad that was set by hand, and backward has given it a gradient since the last step, "
        "which the engine has taken already: it cannot tell which of the two is meant. Set .grad to None, "
        "or call engine.zero_grad() before setting it.");
    units[place.unit] = true;
  }
  return units;
}

bool GradientIntake::has_left() const {
  return std::any_of(places_.begin(), places_.end(),
                     [&](const Place& place) { return tensor(place).grad().defined(); });
}

void GradientIntake::take_left() {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (tensor(places_[i]).grad().defined()) take(static_cast<int>(i));
  }
  replaced_.assign(replaced_.size(), false);
}

std::vector<bool> GradientIntake::check_collected() {
  follow();
  std::vector<bool> units(units_.size(), false);
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (!is_collected(i)) continue;
    gradients::check_layout(parameter(place), tensor(place).grad());
    units[place.unit] = true;
  }
  return units;
}

void GradientIntake::take_collected() {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!is_collected(i)) continue;
    take(static_cast<int>(i));
    replaced_[i] = false;
  }
}

void GradientIntake::take(int index) {
  const Place& place = places_[index];
  const Tensor& own = tensor(place);
  const Tensor gradient = own.grad();
  own.mutable_grad().reset();
  // An accumulator without a hook collected from the engine's own backward, which scales.
  const double scale = replaced_[index] ? 1.0 : loss_scale_.load();
  reducer_.add_coming(place.unit, place.parameter, ordered_and_scaled(index, gradient, scale));
}

std::string GradientIntake::drop_left() {
  held_ = nullptr;
  waiting_.clear();
  joining_.clear();
  std::string first;
  for (const Place& place : places_) {
    const Tensor& own = tensor(place);
    if (!own.grad().defined()) continue;
    if (first.empty()) first = parameter(place).name;
    own.mutable_grad().reset();
  }
  return first;
}

}  // namespace deeptide::engine
