// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gathers gradients into `.grad`, notices what became of them, and writes that back.
#include "engine/step/kept_gradients.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <span>

#include "base/digest.h"

namespace deeptide::engine {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

namespace {

uint64_t digest_of(const Tensor& flat) {
  const Tensor here = flat.cpu();
  return digest_of_bytes(here.const_data_ptr(), here.nbytes());
}

}  // namespace

KeptGradients::KeptGradients(std::vector<Unit*> trainable, gradients::Reducer& reducer, Channels& channels,
                             const std::shared_ptr<device::Ledger>& ledger, at::Device device)
    : units_(std::move(trainable)), reducer_(reducer), channels_(channels) {
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    const Unit& unit = *units_[u];
    whole_.push_back(device::allocate_flat(ledger, device::Role::gradients, unit.numel(), unit.layout().dtype, device));
    for (int p = 0; p < static_cast<int>(unit.parameters().size()); ++p) {
      Kept& kept = all_.emplace_back(Kept{.unit = u, .parameter = p});
      for (const Tensor& tensor : unit.parameters()[p].tensors) kept.places.push_back({.tensor = tensor});
    }
  }
}

int64_t KeptGradients::predicted_bytes() const {
  int64_t bytes = 0;
  for (const Tensor& whole : whole_) bytes += static_cast<int64_t>(whole.nbytes());
  return bytes;
}

bool KeptGradients::shown() const {
  std::lock_guard lock(mutex_);
  return shown_;
}

void KeptGradients::show(Boundary& boundary) {
  at::NoGradGuard no_grad;
  take_back();
  const std::vector<uint8_t> own = reducer_.seen();
  const auto seen = boundary.exchange_all(std::span<const uint8_t>(own),
                                          {"backward", "agreeing on the parameters that have a gradient"});
  std::vector<bool> has(own.size(), false);
  for (size_t i = 0; i < seen.size(); ++i) has[i % own.size()] = has[i % own.size()] || seen[i] != 0;
  std::lock_guard lock(mutex_);
  int gathered = -1;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (!has[i]) continue;
    if (all_[i].unit != gathered) gather(gathered = all_[i].unit);
    set(all_[i]);
  }
  shown_ = were_shown_ = true;
}

void KeptGradients::gather(int unit) {
  const Unit& u = *units_[unit];
  const Tensor sum = reducer_.gradient(unit).sum();
  const Tensor& whole = whole_[unit];
  const Tensor own = whole.narrow(0, u.shard_begin(), sum.numel());
  own.copy_(loss_scale_ == 1.0 ? sum : sum.div(loss_scale_));
  if (own.numel() == whole.numel()) return;
  comm::Group& gathers = channels_.of(u.shard_over(), Channels::Purpose::gathers);
  const int64_t before = gathers.sent_bytes();
  auto pending = gathers.all_gather(whole, own);
  sent_bytes_ += gathers.sent_bytes() - before;
  gathers.wait(pending, {"backward", "gathering gradients of unit '" + u.layout().name + "' for .grad"});
}

/// The parameter's elements in this object's copy.
Tensor KeptGradients::flat(const Kept& kept) const {
  return whole_[kept.unit].narrow(0, parameter(kept).offset, parameter(kept).numel);
}

void KeptGradients::set(Kept& kept) {
  for (size_t t = 0; t < kept.places.size(); ++t) {
    Place& place = kept.places[t];
    if (!place.tensor.requires_grad()) continue;
    place.gradient = parameter(kept).view_of(whole_[kept.unit], static_cast<int>(t)).variable_data();
    place.tensor.mutable_grad() = place.gradient;
  }
  kept.digest = digest_of(flat(kept));
}

/// Brings what the program put into `.grad` into this object's copy. Looks at the values: `.grad.data.mul_()`, NumPy
/// and torch's GradScaler move no version counter.
KeptGradients::Change KeptGradients::look(const Kept& kept) const {
  bool had_any = false, has_any = false;
  for (size_t t = 0; t < kept.places.size(); ++t) {
    const Place& place = kept.places[t];
    const Tensor& now = place.tensor.grad();
    had_any = had_any || place.gradient.defined();
    has_any = has_any || now.defined();
    if (!now.defined() || now.is_same(place.gradient)) continue;
    parameter(kept).view_of(whole_[kept.unit], static_cast<int>(t)).copy_(now.is_sparse() ? now.to_dense() : now);
  }
  if (!has_any) return had_any ? kDropped : kUntouched;
  const uint64_t digest = digest_of(flat(kept));
  return had_any && digest == kept.digest ? kUntouched : std::max(digest, kDropped + 1);
}

void KeptGradients::agree(Boundary& boundary) {
  at::NoGradGuard no_grad;
  std::vector<Change> own;
  {
    std::lock_guard lock(mutex_);
    own.push_back(shown_ ? 1 : 0);
    for (const Kept& kept : all_) {
      const Change now = shown_ ? look(kept) : kUntouched;
      own.push_back(now == kUntouched ? kept.change : now);
    }
  }
  const auto all = boundary.exchange_all(std::span<const Change>(own), {"step", "comparing changes of .grad"});
  bool all_show = true;
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t at = i % own.size();
    if (at == 0) {
      all_show = all_show && all[i] != 0;
      continue;
    }
    const Kept& kept = all_[at - 1];
    const size_t rank = i / own.size(), like = rank_alike(kept, rank);
    const Change first = all[like * own.size() + at];
    const bool differs = all[i] != first || (all[i] == kDropped) != (all[at] == kDropped);
    if (differs) refuse(kept, all[i] != first ? std::pair(first, like) : std::pair(all[at], size_t{0}), {all[i], rank});
  }
  for (Kept& kept : all_) kept.change = kUntouched;
  if (!all_show) take_back();
}

/// The first rank that has the same elements of a parameter as this one. Ranks are the data team's. Slices change to
/// other values than their neighbours', which are the team's first ranks.
size_t KeptGradients::rank_alike(const Kept& kept, size_t rank) const {
  const auto& slices = units_[kept.unit]->cut_over();
  return slices ? rank % static_cast<size_t>(slices->size()) : 0;
}

void KeptGradients::refuse(const Kept& kept, std::pair<Change, size_t> first, std::pair<Change, size_t> other) const {
  const auto text = [](Change change) {
    if (change == kUntouched) return "left alone";
    return change == kDropped ? "set to None" : "changed";
  };
  const auto& ranks = channels_.data().ranks();
  const bool both = first.first > kDropped && other.first > kDropped;
  TORCH_CHECK_VALUE(false, "the .grad of parameter '", parameter(kept).name, "' was ", text(first.first), " on rank ",
                    ranks[first.second], " and ", text(other.first), " on rank ", ranks[other.second],
                    both ? ", to other values" : "",
                    ". Change gradients alike on every rank, or on none; a rank that has joined changes none");
}

void KeptGradients::absorb() {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  for (Kept& kept : all_) {
    if (const Change change = shown_ ? look(kept) : kUntouched; change != kUntouched) absorb_one(kept, change);
  }
}

void KeptGradients::absorb_one(Kept& kept, Change change) {
  if (change == kDropped) return reducer_.drop_gradient(kept.unit, kept.parameter);
  const auto [first, last] = units_[kept.unit]->owned_range(parameter(kept));
  const Tensor values = whole_[kept.unit].narrow(0, first, last - first).to(at::kFloat).mul(loss_scale_);
  const int64_t begin = first == last ? 0 : first - units_[kept.unit]->shard_begin();
  reducer_.set_gradient(kept.unit, kept.parameter, begin, values);
}

void KeptGradients::take_back() {
  at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  if (!shown_) return;
  for (Kept& kept : all_) {
    const Change change = look(kept);
    if (change == kUntouched) continue;
    kept.change = change;
    absorb_one(kept, change);
  }
  hide();
}

void KeptGradients::forget() {
  std::lock_guard lock(mutex_);
  hide();
  were_shown_ = false;
  for (Kept& kept : all_) kept.change = kUntouched;
}

void KeptGradients::hide() {
  for (Kept& kept : all_) {
    for (Place& place : kept.places) {
      if (shown_) place.tensor.mutable_grad().reset();
      place.gradient.reset();
    }
  }
  shown_ = false;
}

}  // namespace deeptide::engine
