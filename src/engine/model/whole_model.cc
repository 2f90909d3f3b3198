// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The first rank takes its own stage's tensors, then each other stage's: their first ranks send them one by one.
#include "engine/model/whole_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "base/libraries/nlohmann.h"
#include "engine/engine_impl.h"
#include "engine/step/across_stages.h"
#include "sharding/tensor_slices.h"

namespace deeptide {

using at::Tensor;
using engine::Listed;
using sharding::Parameter;

namespace {

/// Collective over the mesh. Every stage's list, in the stages' order.
std::vector<std::vector<Listed>> lists_of_stages(engine::Stages* stages, const std::vector<Listed>& own) {
  if (stages == nullptr) return {own};
  nlohmann::json text = nlohmann::json::array();
  for (const Listed& each : own) text.push_back({each.name, static_cast<int>(each.dtype), each.shape});
  std::vector<std::vector<Listed>> lists;
  using Row = std::tuple<std::string, int, std::vector<int64_t>>;
  for (const std::string& theirs : engine::texts_of_stages(*stages, write_json(text), "listing what stages export")) {
    const auto rows = read_json(theirs).get<std::vector<Row>>();
    std::vector<Listed>& list = lists.emplace_back();
    for (const auto& [name, dtype, shape] : rows) list.push_back({name, static_cast<at::ScalarType>(dtype), shape});
  }
  return lists;
}

/// Buffers and what goes with them, without those that a later stage has; then what the program has put in the place of
/// parameters, or added.
std::map<std::string, Tensor> loose_tensors(engine::Stages* stages, const engine::LooseTensors& now,
                                            const std::vector<NamedTensor>& more, bool exclude_frozen) {
  std::vector<NamedTensor> tensors = more;
  tensors.insert(tensors.end(), now.buffers.begin(), now.buffers.end());
  if (stages != nullptr) engine::leave_to_later_stages(*stages, tensors);
  std::map<std::string, Tensor> loose;
  for (const NamedTensor& each : tensors) loose[each.name] = each.tensor;
  for (const auto* parameters : {&now.replaced, &now.added}) {
    for (const NamedTensor& each : *parameters) {
      if (!exclude_frozen || each.tensor.requires_grad()) loose[each.name] = each.tensor;
    }
  }
  return loose;
}

}  // namespace

/// The tensors of a unit under each of their names, in the unit's order.
std::vector<Listed> Engine::Impl::listed(const sharding::Unit& unit, const engine::LiveNames& names) const {
  std::vector<Listed> found;
  for (const Parameter& p : unit.parameters()) {
    const auto slice = design.topology.slices.find(p.name);
    for (const auto& [name, tensor] : names.of(p)) {
      const at::IntArrayRef shape = p.tensors[static_cast<size_t>(tensor)].sizes();
      const bool is_cut = slice != design.topology.slices.end();
      found.push_back({name, unit.layout().dtype, is_cut ? sharding::whole_shape(slice->second, shape) : shape.vec()});
    }
  }
  return found;
}

void Engine::Impl::visit_model(const std::vector<NamedTensor>& more, bool exclude_frozen,
                               const engine::ModelTaker& taker) {
  const at::NoGradGuard no_grad;
  engine::Stages* const stages = channels.stages();
  const engine::LooseTensors now = enter_to_inspect();
  const engine::LiveNames names(now);
  const std::map<std::string, Tensor> loose = loose_tensors(stages, now, more, exclude_frozen);
  const auto is_left_out = [&](const auto& unit) { return exclude_frozen && !unit->layout().trainable; };
  std::vector<Listed> own;
  for (const auto& unit : model.units()) {
    if (is_left_out(unit)) continue;
    for (Listed& each : listed(*unit, names)) own.push_back(std::move(each));
  }
  for (const auto& [name, tensor] : loose) own.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  const auto lists = lists_of_stages(stages, own);
  boundary->together_on_all_stages("starting the export", [&] {
    if (!channels.is_first()) return;
    std::vector<Listed> all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    taker.begin(all);
  });
  const comm::Site site{"checkpoint", "bringing another stage's parameters to the first rank"};
  const bool sends = stages != nullptr && stages->index() > 0 && channels.data().index() == 0;
  const auto give = [&](const std::string& name, const Tensor& values) {
    if (channels.is_first()) return taker.take(name, values);
    if (!sends || values.numel() == 0) return;
    stages->mail().send_known(values.cpu().contiguous(), 0);
    stages->mail().flush(site);  // one at a time is on its way
  };
  for (const auto& unit : model.units()) {
    if (is_left_out(unit)) continue;
    const Tensor whole = gathered(*unit);
    for (const Parameter& p : unit->parameters()) {
      for (const auto& [name, tensor] : names.of(p)) give(name, whole_parameter(p, whole, tensor));
    }
  }
  for (const auto& [name, tensor] : loose) give(name, tensor);
  if (!channels.is_first()) return;
  for (size_t stage = 1; stage < lists.size(); ++stage) {
    for (const Listed& each : lists[stage]) {
      Tensor values = at::empty(each.shape, each.dtype);
      if (values.numel() > 0) values = stages->take(stages->expect(values, static_cast<int>(stage)), site, nullptr);
      taker.take(each.name, values);
    }
  }
}

std::vector<NamedTensor> Engine::Impl::whole_model(bool exclude_frozen) {
  std::vector<NamedTensor> state;
  visit_model({}, exclude_frozen,
              {.begin = [](const std::vector<Listed>&) {},
               .take =
                   [&](const std::string& name, const Tensor& values) {
                     state.push_back({name, values.detach().clone().cpu()});
                   }});
  return state;
}

}  // namespace deeptide
