// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Serves programs that look at gradients or drop them by torch's means, which touch `.grad` alone.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "deeptide/binding.h"
#include "engine/engine_impl.h"
#include "optim/rules/rule.h"

namespace deeptide {

using at::Tensor;
using Impl = EngineAccess::Impl;

/// None within a backward: gradients are on their way.
Impl::Taken Impl::taken_gradient(const Tensor& parameter) const {
  if (!intake || intake->is_in_backward() || torch::autograd::get_current_graph_task_id() != -1) return Taken::none;
  if (kept && kept->shown()) return Taken::none;
  const auto place = intake->place_of(parameter);
  if (!place || !reducer->has_seen(place->first, place->second)) return Taken::none;
  return why_hidden().empty() ? Taken::showable : Taken::hidden;
}

std::string Impl::why_hidden() const {
  if (design.policy.shard_parameters) {
    return "at stage 3 each rank has a shard of it. safe_get_full_grad(parameter) before step() gives it whole";
  }
  if (!stepper->is_boundary() || !reducer->has_added_any()) {
    return "it is shown after the last backward of an accumulation, once it is summed over the ranks: look where "
           "engine.is_gradient_accumulation_boundary()";
  }
  if (optimizer->signs() != nullptr) return design.rule->name() + " forms no mean of the ranks' gradients";
  if (design.topology.mesh.size(world::Axis::expert) > 1) return "experts on an axis of their own have none yet";
  if (reducer->files() != nullptr || reducer->leave()) return "deeptide.placement.gradients keeps it elsewhere";
  return "";
}

engine::KeptGradients* Impl::keep_gradients() {
  kept = std::make_unique<engine::KeptGradients>(model.trainable(), *reducer, channels, ledger, model.device());
  intake->announce([this] { stepper->meet_backward(); });
  return kept.get();
}

bool Impl::drop_gradients(const std::vector<Tensor>& of) {
  if (!intake || (kept && kept->shown())) return false;
  std::vector<uint8_t> given = reducer->seen();
  size_t num_given = 0, first = 0;
  std::vector<size_t> firsts;
  for (const sharding::Unit* unit : model.trainable()) {
    firsts.push_back(first);
    first += unit->parameters().size();
  }
  std::vector<bool> named(given.size(), false);
  for (const Tensor& tensor : of) {
    const auto place = intake->place_of(tensor);
    if (!place) continue;
    const size_t at = firsts[static_cast<size_t>(place->first)] + static_cast<size_t>(place->second);
    num_given += given[at] != 0 && !named[at] ? 1 : 0;
    named[at] = true;
  }
  if (num_given == 0) return false;
  const bool all = std::find(named.begin(), named.end(), false) == named.end();
  all ? stepper->zero_grad() : stepper->drop_gradients(of);
  return true;
}

namespace binding {

TakenGradient taken_gradient(const Engine& engine, const Tensor& parameter) {
  const Impl& impl = EngineAccess::impl_of(engine);
  if (!impl.is_ours()) return TakenGradient::none;
  switch (impl.taken_gradient(parameter)) {
    case Impl::Taken::none:
      return TakenGradient::none;
    case Impl::Taken::showable:
      return TakenGradient::showable;
    case Impl::Taken::hidden:
      return TakenGradient::hidden;
  }
  return TakenGradient::none;
}

std::string why_hidden(const Engine& engine) { return EngineAccess::impl_of(engine).why_hidden(); }

void show_gradients(Engine& engine) {
  Impl& impl = EngineAccess::impl_of(engine);
  impl.told("reading .grad", [&] { impl.stepper->show_gradients(); });
}

bool drop_gradients(Engine& engine, const std::vector<Tensor>& of) {
  Impl& impl = EngineAccess::impl_of(engine);
  return impl.is_ours() && impl.told("zero_grad", [&] { return impl.drop_gradients(of); });
}

}  // namespace binding
}  // namespace deeptide
