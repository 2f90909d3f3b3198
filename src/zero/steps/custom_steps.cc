// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parts are views of the masters, cut at the shards' ends.
#include "zero/steps/custom_steps.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>

namespace deeptide::zero {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

CustomSteps::CustomSteps(const OptimizerStates& states, CustomOptimizer& optimizer, bool gradients_leave,
                         const std::shared_ptr<device::Ledger>& ledger)
    : states_(states), optimizer_(optimizer) {
  const std::string why_whole = optimizer.needs_whole();
  bool has_all = true, alone = true;
  for (int u = 0; u < states.num_units(); ++u) {
    const Unit& unit = states.unit(u);
    has_all = has_all && states.master(u).numel() == unit.numel() && !unit.cut_over();
    alone = alone && unit.shard_over().size() == 1;
  }
  TORCH_CHECK_VALUE(why_whole.empty() || has_all, optimizer.info().name,
                    " cannot step shards of parameters: ", why_whole,
                    ". Use ZeRO stage 0, or an optimizer that steps each element by itself");
  whole_ = alone || !why_whole.empty();
  std::vector<ParameterPart> handed;
  for (int u = 0; u < states.num_units(); ++u) {
    const Unit& unit = states.unit(u);
    const Tensor master = states.master(u).in_place();
    TORCH_CHECK_VALUE(master.defined(), optimizer.info().name,
                      " is your own optimizer, which cannot step what lies in files: set the device of "
                      "zero_optimization's offload_optimizer and offload_param to \"none\"");
    const int64_t slice = whole_ ? unit.numel() : unit.layout().shard;
    for (int p = 0; p < static_cast<int>(unit.parameters().size()); ++p) {
      const Parameter& parameter = unit.parameters()[p];
      int64_t begin = std::max(parameter.offset, states.begin(u));
      const int64_t last = std::min(parameter.offset + parameter.numel, states.end(u));
      while (begin < last) {
        const int64_t end = std::min(last, (begin / slice + 1) * slice);
        parts_.push_back({u, p, begin, end});
        handed.push_back({parameter.name, parameter.group, begin - parameter.offset, in_shape(parts_.back(), master)});
        begin = end;
      }
    }
  }
  optimizer_.adopt(std::move(handed));
  for (int u = 0; states.use_host() && !gradients_leave && u < states.num_units(); ++u) {
    const int64_t numel = states.master(u).numel();
    host_gradients_.push_back(device::allocate_flat(ledger, device::Role::host_optimizer, numel, at::kFloat, at::kCPU));
  }
}

Tensor CustomSteps::beside_master(int unit, const Tensor& gradient) const {
  return host_gradients_.empty() ? gradient : host_gradients_[unit].copy_(gradient);
}

int64_t CustomSteps::host_gradient_bytes() const {
  int64_t bytes = 0;
  for (const Tensor& gradient : host_gradients_) bytes += static_cast<int64_t>(gradient.nbytes());
  return bytes;
}

const Parameter& CustomSteps::parameter(const Part& part) const {
  return states_.unit(part.unit).parameters()[part.parameter];
}

/// The part of `flat`, which covers the unit's states. Scalars keep one dimension, as all parts have.
Tensor CustomSteps::in_shape(const Part& part, const Tensor& flat) const {
  const Tensor values = flat.narrow(0, part.begin - states_.begin(part.unit), part.end - part.begin);
  const Tensor& like = parameter(part).tensors.front();
  return whole_ && like.dim() > 0 ? values.view(like.sizes()) : values;
}

void CustomSteps::step(const std::vector<Tensor>& gradients, const std::vector<Hyperparameters>& groups,
                       const ActiveParameters& active) {
  std::vector<Tensor> by_part;
  for (const Part& part : parts_) {
    const bool moves = active.has(part.unit, part.parameter);
    by_part.push_back(moves ? in_shape(part, gradients[part.unit]) : Tensor());
  }
  optimizer_.step(by_part, groups);
}

Tensor CustomSteps::state(int unit, int parameter, const std::string& name) const {
  Tensor whole;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    if (part.unit != unit || part.parameter != parameter) continue;
    for (const PartState& state : optimizer_.state(i)) {
      if (!state.per_element || state.name != name) continue;
      const Tensor master = states_.master(unit).in_place();
      if (!whole.defined()) whole = at::zeros({master.numel()}, master.options());
      whole.narrow(0, part.begin - states_.begin(unit), part.end - part.begin).copy_(state.value.reshape({-1}));
    }
  }
  return whole;
}

void CustomSteps::write(int unit, int parameter, const std::string& name, int64_t first, const Tensor& values) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const int64_t begin = std::max(part.begin, first), end = std::min(part.end, first + values.numel());
    if (part.unit != unit || part.parameter != parameter || begin >= end) continue;
    auto states = optimizer_.state(i);
    for (PartState& state : states) {
      if (!state.per_element || state.name != name) continue;
      Tensor changed = state.value.clone(at::MemoryFormat::Contiguous);
      changed.view({-1}).narrow(0, begin - part.begin, end - begin).copy_(values.narrow(0, begin - first, end - begin));
      state.value = changed;
    }
    optimizer_.set_state(i, std::move(states));
  }
}

std::vector<std::string> CustomSteps::names(int unit, int parameter) const {
  std::set<std::string> found;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].unit != unit || parts_[i].parameter != parameter) continue;
    for (const PartState& state : optimizer_.state(i)) {
      if (state.per_element) found.insert(state.name);
    }
  }
  return {found.begin(), found.end()};
}

}  // namespace deeptide::zero
