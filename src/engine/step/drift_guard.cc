// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One digest per parameter and state; ranks that differ name the first.
#include "engine/step/drift_guard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/digest.h"
#include "base/libraries/format.h"
#include "base/log.h"
#include "engine/step/across_stages.h"

namespace deeptide::engine {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;
using sharding::UnitMemory;
using tiers::Buffer;

namespace {

uint64_t digest_of_copy(const Tensor& values) {
  const Tensor here = values.cpu().contiguous();
  return digest_of_bytes(here.const_data_ptr(), here.nbytes());
}

}  // namespace

DriftGuard::DriftGuard(Channels& channels, Boundary& boundary, BoundModel& model, zero::ShardedOptimizer* optimizer,
                       const RuntimeConfig& config)
    : channels_(channels), boundary_(boundary), model_(model), optimizer_(optimizer), config_(config) {}

Tensor DriftGuard::Copy::values() const {
  const Tensor all = flat.in_place();
  return all.defined() ? all.narrow(0, range.begin, range.count) : flat.copy(range);
}

/// States that cover the whole unit are those of stage 0.
std::vector<DriftGuard::Copy> DriftGuard::copies() const {
  std::vector<Copy> found;
  int trained = 0;
  for (const auto& unit : model_.units()) {
    const bool is_trained = unit->layout().trainable && optimizer_;
    const int position = unit->layout().trainable ? trained++ : -1;
    if (unit->memory() != UnitMemory::whole) continue;
    std::vector<std::pair<std::string, Buffer>> flats{{"", Buffer::resident(unit->whole())}};
    if (is_trained) {
      const zero::OptimizerStates& states = optimizer_->states();
      for (const auto& state : states.buffers(position)) {
        const bool is_copy = state.data.tier() != tiers::Tier::nvme && state.data.numel() == unit->numel();
        if (is_copy && !(state.role == "master" && states.is_aliased(position))) {
          flats.emplace_back(state.role + " of ", state.data);
        }
      }
    }
    for (const Parameter& p : unit->parameters()) {
      for (const auto& [what, flat] : flats) {
        found.push_back({what + "'" + p.name + "'", flat, {p.offset, p.numel}});
      }
    }
  }
  return found;
}

bool DriftGuard::is_due(int64_t step) const {
  return config_.drift_interval > 0 && step % config_.drift_interval == 0 && channels_.data().size() > 1;
}

std::string DriftGuard::check(int64_t step) {
  if (!is_due(step)) return {};
  const std::string own = compare(step);
  Stages* const stages = channels_.stages();
  if (config_.on_drift != OnDrift::stop || stages == nullptr) return own;
  for (std::string& text : texts_of_stages(*stages, own, "asking the other stages whether copies differ")) {
    if (!text.empty()) return std::move(text);
  }
  return {};
}

std::string DriftGuard::compare(int64_t step) {
  const at::NoGradGuard no_grad;
  const std::vector<Copy> all = copies();
  std::vector<uint64_t> own;
  for (const Copy& copy : all) own.push_back(digest_of_copy(copy.values()));
  if (own.empty()) return {};
  const auto digests =
      boundary_.exchange_all(std::span<const uint64_t>(own), {"step", "comparing what every rank has a copy of"});
  std::vector<size_t> differing;
  size_t other = 0;  // the first rank that differs in the first of them
  for (size_t i = 0; i < own.size(); ++i) {
    for (size_t at = i + own.size(); at < digests.size(); at += own.size()) {
      if (digests[at] == digests[i]) continue;
      if (differing.empty()) other = at / own.size();
      differing.push_back(i);
      break;
    }
  }
  if (differing.empty()) return {};
  const auto& ranks = channels_.data().ranks();
  const auto name_of = [this](int rank) { return channels_.mesh().name(rank); };
  const std::string text = format_text(
      "after {} applied steps {} of {} replicated tensors differ between ranks; the first is {}, on {} "
      "and {}. A rank has written it alone, or its memory is damaged",
      step, differing.size(), all.size(), all[differing.front()].name, name_of(ranks[0]), name_of(ranks[other]));
  if (config_.on_drift == OnDrift::stop) return text;
  if (config_.on_drift == OnDrift::sync) make_equal(all, differing);
  if (channels_.data().index() == 0) {
    log(LogLevel::warning,
        text + (config_.on_drift == OnDrift::sync ? format_text("; all ranks have {}'s now", name_of(ranks[0])) : ""));
  }
  return {};
}

void DriftGuard::make_equal(const std::vector<Copy>& copies, const std::vector<size_t>& differing) {
  for (int i = 0; optimizer_ && i < optimizer_->states().num_units(); ++i) optimizer_->states().changing(i);
  for (const size_t i : differing) {
    // In memory of its own, for a view of a unit may begin at any element; on the device, where the channel is.
    Tensor values = at::empty({copies[i].range.count}, copies[i].values().options().device(model_.device()));
    values.copy_(copies[i].values());
    auto pending = channels_.gathers().broadcast(values, 0);
    channels_.gathers().wait(pending, {"step", "making " + copies[i].name + " equal on all ranks"});
    copies[i].flat.copy_from(values, copies[i].range.begin);
  }
}

}  // namespace deeptide::engine
