// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Roles tell apart what is per element, under the state's own name, and what is one value per parameter.
#include "engine/state/custom_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string_view>

#include "checkpoint/imports/foreign_table.h"
#include "engine/model/slices.h"

namespace deeptide::engine {

using at::Tensor;
using checkpoint::Piece;
using checkpoint::Reader;
using checkpoint::Region;
using checkpoint::Role;
using sharding::Parameter;
using Part = zero::CustomSteps::Part;

namespace {

constexpr std::string_view kWhole = checkpoint::kWholeState;

}  // namespace

std::vector<Piece> custom_pieces(const Topology& topology, const zero::CustomSteps& custom) {
  std::vector<Piece> pieces, values;  // per element, and one per parameter
  for (size_t i = 0; i < custom.parts().size(); ++i) {
    const Part& part = custom.parts()[i];
    const Parameter& p = custom.parameter(part);
    const auto [first, last] = p.unit->owned_range(p);
    const int64_t begin = std::max(part.begin, first), end = std::min(part.end, last);
    if (begin >= end) continue;
    const auto& team = p.unit->cut_over();
    const bool saves_values = begin == p.offset && (!team || team->index() == 0);  // slices have equal ones
    for (const PartState& state : custom.optimizer().state(i)) {
      const Tensor flat = state.value.detach().reshape({-1});
      if (state.per_element) {
        pieces.push_back({p.name, Role::moment(state.name), p.tensors.front().sizes().vec(),
                          Region::range(begin - p.offset, end - p.offset),
                          flat.narrow(0, begin - part.begin, end - begin)});
      } else if (saves_values) {
        values.push_back({p.name, Role::moment(state.name + std::string(kWhole)), state.value.sizes().vec(),
                          Region::range(0, flat.numel()), flat});
      }
    }
  }
  place_slices(topology, Extent::owned, pieces);
  std::move(values.begin(), values.end(), std::back_inserter(pieces));
  return pieces;
}

CustomLoad::CustomLoad(const Topology& topology, const Reader& reader, zero::CustomSteps& custom)
    : custom_(&custom), states_(custom.parts().size()) {
  std::vector<Piece> elements;
  std::multimap<std::string, size_t> parts;
  for (size_t i = 0; i < custom.parts().size(); ++i) parts.emplace(custom.parameter(custom.parts()[i]).name, i);
  for (const Piece& saved : reader.table()) {
    if (!saved.role.is_moment() || saved.role.is_rounding_error()) continue;
    const std::string& role = saved.role.moment_name();
    const bool per_element = !role.ends_with(kWhole);
    const auto [first, last] = parts.equal_range(saved.name);
    if (first == last)
      wanted_.push_back({saved.name, saved.role, saved.shape, Region(), at::empty({0}, saved.data.dtype())});
    for (auto found = first; found != last; ++found) {
      const Part& part = custom.parts()[found->second];
      const Parameter& p = custom.parameter(part);
      const int64_t begin = part.begin - p.offset;
      const Region region = per_element ? Region::range(begin, begin + part.end - part.begin) : saved.region;
      const Tensor value = at::zeros({region.numel()}, saved.data.dtype());  // padding of slices stays so
      const bool is_cut = per_element && p.slice;
      const auto shape = is_cut ? p.tensors.front().sizes().vec() : saved.shape;
      (is_cut ? elements : wanted_).push_back({saved.name, saved.role, shape, region, value});
      const std::string name = per_element ? role : role.substr(0, role.size() - kWhole.size());
      states_[found->second].push_back({name, per_element ? value : value.view(saved.shape), per_element});
    }
  }
  place_slices(topology, Extent::held, elements);
  std::move(elements.begin(), elements.end(), std::back_inserter(wanted_));
}

void CustomLoad::apply() {
  for (size_t i = 0; custom_ && i < states_.size(); ++i) custom_->optimizer().set_state(i, std::move(states_[i]));
}

}  // namespace deeptide::engine
