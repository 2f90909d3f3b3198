// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rebuilds the engine over a model whose parameters have changed: what was trained before goes on bit for bit.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "deferred/recorder.h"
#include "engine/bind/agreement.h"
#include "engine/design/optimizer_groups.h"
#include "engine/engine_impl.h"
#include "engine/state/carried_state.h"

namespace deeptide {

using at::Tensor;
using comm::Call;
using engine::CarriedAsBefore;
using engine::CarriedParameter;
using engine::CarriedState;
using sharding::Parameter;
using sharding::Unit;

namespace engine {

std::pair<int64_t, int64_t> CarriedParameter::slice_of(int rank) const {
  const int64_t first = std::clamp(rank * shard - offset, int64_t{0}, numel);
  return {first, std::clamp((rank + 1) * shard - offset, first, numel)};
}

const CarriedParameter* CarriedState::find(const Tensor& tensor) const {
  const auto is_it = [&](const CarriedParameter& p) {
    return p.tensor.is_same(tensor) && (p.resized.defined() || p.numel == tensor.numel());
  };
  const auto found = std::find_if(parameters.begin(), parameters.end(), is_it);
  return found == parameters.end() ? nullptr : &*found;
}

const CarriedParameter* CarriedState::find(const Parameter& p) const {
  for (const Tensor& tensor : p.tensors) {
    if (const CarriedParameter* found = find(tensor)) return found;
  }
  return nullptr;
}

void CarriedState::make_whole() {
  for (WholeValue& whole : wholes) whole.tensor.set_data(std::move(whole.value));
  wholes.clear();
}

}  // namespace engine

namespace {

/// The states of one unit, parameter by parameter, as far as this rank owns them.
void carry_unit(const zero::OptimizerStates& states, int index, CarriedState& carried) {
  const Unit& unit = states.unit(index);
  for (const Parameter& p : unit.parameters()) {
    CarriedParameter& own = carried.parameters.emplace_back(
        CarriedParameter{p.name, p.tensors.front(), p.offset, p.numel, {}, unit.layout().shard, {}});
    if (p.is_resized()) own.resized = p.tensors.front().detach().reshape({-1}).to(at::kFloat);
    const auto [first, last] = unit.owned_range(p);
    for (const auto& state : states.buffers(index)) {
      const bool is_parameter = state.role == "master" && states.is_aliased(index);
      if (is_parameter || !states.has(p, state.role)) continue;
      Tensor flat = state.data.in_place();
      if (!flat.defined()) {  // in files, or in two places
        flat = at::empty({state.data.numel()}, state.data.dtype());
        state.data.copy_to(flat);
      }
      own.states[state.role] = flat.narrow(0, first < last ? first - states.begin(index) : 0, last - first);
    }
  }
}

/// Copies each parameter of a unit that is to be sharded no longer; ties keep sharing their memory.
void keep_whole(const Unit& unit, const Tensor& whole, CarriedState& carried) {
  for (const Parameter& p : unit.parameters()) {
    if (p.is_resized()) continue;  // it has memory of its own already
    const Tensor flat = whole.narrow(0, p.offset, p.numel).clone();
    for (const Tensor& tensor : p.tensors) {
      carried.wholes.push_back({tensor, at::as_strided(flat, tensor.sizes(), tensor.strides(), 0)});
    }
  }
}

/// Errors: ValueError naming a parameter that has changed in more than the number of its rows.
void check_rows(const engine::BoundModel& bound) {
  for (const Parameter* p : bound.parameters()) {
    if (!p->is_resized()) continue;
    const at::IntArrayRef now = p->tensors.front().sizes(), before = p->sizes.front();
    const bool rows_alone = now.size() == before.size() && !now.empty() && now.slice(1) == before.slice(1);
    TORCH_CHECK_VALUE(rows_alone && p->tensors.size() == 1 && !p->slice, "rebuild: parameter '", p->name,
                      "' has the shape ", now, " now, and had ", before,
                      ": only a whole parameter's number of rows can change. Put a new parameter in its place");
  }
}

/// Returns what a parameter that has other rows now keeps of a state: its first elements, as many as there are before
/// and now. `values`: its own values now, which the program may have rewritten; undefined for moments.
Tensor kept_rows(const Tensor& state, const Tensor& values, at::ScalarType dtype) {
  if (!values.defined()) return state;
  const Tensor now = values.to(state.device(), state.scalar_type());
  return at::where(state.to(dtype) == now.to(dtype), state, now);
}

/// The changes that all ranks must make alike to each parameter, a line each.
std::vector<std::string> origins(const ModelDescription& model, const engine::BoundModel& bound) {
  std::vector<std::string> lines;
  for (const NamedTensor& now : model.parameters) {
    const engine::BoundName before = bound.find(now.tensor);
    lines.push_back("parameter '" + now.name + "', " +
                    (before.parameter ? "bound as '" + before.parameter->name + "' before" : "new to the engine"));
  }
  return lines;
}

/// Collective. The whole state of a parameter from the slices that the ranks have carried.
Tensor whole_state(const CarriedParameter& p, const Tensor& carried, const std::string& role, comm::Group& gathers,
                   at::Device device) {
  if (gathers.size() == 1) return carried;
  const Tensor own = carried.to(device);
  int64_t most = 0;
  for (int rank = 0; rank < gathers.size(); ++rank) {
    const auto [first, last] = p.slice_of(rank);
    most = std::max(most, last - first);
  }
  const Tensor padded = at::zeros({most}, own.options());
  padded.narrow(0, 0, own.numel()).copy_(own);
  const Tensor slices = at::empty({most * gathers.size()}, own.options());
  auto pending = gathers.all_gather(slices, padded);
  gathers.wait(pending, {"start", "gathering " + role + " of '" + p.name + "'"});
  Tensor whole = at::empty({p.numel}, own.options());
  for (int rank = 0; rank < gathers.size(); ++rank) {
    const auto [first, last] = p.slice_of(rank);
    whole.narrow(0, first, last - first).copy_(slices.narrow(0, rank * most, last - first));
  }
  return whole;
}

/// Writes what this rank holds of a parameter's state: of `whole`, which may have its first elements alone.
void write_held(const Parameter& p, int64_t begin, const tiers::Buffer& data, const Tensor& whole) {
  const int64_t end = p.offset + std::min(whole.numel(), p.numel);
  const int64_t first = std::clamp(begin, p.offset, end);
  const int64_t last = std::clamp(begin + data.numel(), first, end);
  if (first == last) return;
  data.copy_from(whole.narrow(0, first - p.offset, last - first), first - begin);
}

}  // namespace

void Engine::Impl::check_rebuilding() const {
  check_axes("rebuild", /*may_be_cut=*/false);
  check_no_gradients("rebuild");
  TORCH_CHECK_VALUE(!custom,
                    "rebuild: an optimizer of the program's own keeps its states itself, and they cannot move to other "
                    "units. Save a checkpoint, call initialize with a new optimizer, and load it with "
                    "load_module_strict=False");
  TORCH_CHECK_VALUE(!optimizer || !optimizer->states().are_away(),
                    "rebuild while states are offloaded: call reload_states() first");
  TORCH_CHECK_VALUE(!offloaded && !(model.offloaded() && model.offloaded()->uses_files()),
                    "rebuild: states or parameters lie in files, which are not read into memory for it. Save a "
                    "checkpoint, call initialize again, and load it with load_module_strict=False");
}

/// Collective. Changes nothing: on an error the engine goes on as it was.
CarriedState Engine::Impl::carry_state(const ModelDescription& now, const InitOptions& options) {
  at::NoGradGuard no_grad;
  boundary->enter(Call::rebuild, [&](comm::Close& own) {
    own.rounds = reducer ? reducer->rounds_begun() : 0;
    check_rebuilding();
    check_rows(model);
  });
  saver->finish();
  auto terms = engine::terms_of(now, engine::optimizer_groups(now, config, options), config);
  const auto lines = origins(now, model);
  terms.insert(terms.end(), lines.begin(), lines.end());
  engine::check_agreement(channels.control(), terms, {"start", "comparing the model's changes with the other ranks"},
                          "Change the model alike on every rank. Nothing was changed");
  CarriedState carried;
  if (optimizer) {
    optimizer->states().refresh_masters();
    progress.parameter_steps = optimizer->counts().uneven_steps();
    progress.parameter_numbers = optimizer->counts().parameter_numbers();
    for (int unit = 0; unit < optimizer->states().num_units(); ++unit) carry_unit(optimizer->states(), unit, carried);
  }
  carried.progress = progress;
  carried.boundary = stepper->boundary_override();
  carried.as_before = as_before();
  residency->release_all();
  for (const auto& unit : model.units()) {
    if (unit->memory() == sharding::UnitMemory::sharded) keep_whole(*unit, gathered(*unit), carried);
  }
  channels.control().barrier({"start", "waiting for all ranks to have what they carry over"});
  return carried;
}

std::vector<Tensor> Engine::Impl::errors() const {
  std::vector<Tensor> all = rounding_errors();
  if (optimizer) {
    const auto of_signs = optimizer->sign_errors();
    all.insert(all.end(), of_signs.begin(), of_signs.end());
  }
  return all;
}

CarriedAsBefore Engine::Impl::as_before() const {
  CarriedAsBefore before{design.model.groups, errors(), rewind ? rewind->kept() : engine::Rewind::Kept{}};
  const auto& base = stepper->base_hyperparameters();
  for (size_t g = 0; g < base.size(); ++g) before.groups[g].hyperparameters = base[g];
  return before;
}

void Engine::Impl::restore_as_before(const CarriedState& carried) {
  at::NoGradGuard no_grad;
  progress.hyperparameters = carried.progress.hyperparameters;
  adopt_state(carried);
  if (rewind) rewind->take_over(carried.as_before.rewind);
}

/// Collective. Takes over the states of the parameters that were trained before; others begin as at initialize.
void Engine::Impl::adopt_state(const CarriedState& carried) {
  at::NoGradGuard no_grad;
  boundary->enter(Call::rebuild);
  engine::Progress next = carried.progress;
  next.hyperparameters = progress.hyperparameters;
  next.parameter_steps.clear();
  next.parameter_numbers.clear();
  size_t next_carried = 0;  // as long as each parameter lies where it did
  bool is_cut_as_before = true;
  for (int unit = 0; optimizer && unit < optimizer->states().num_units(); ++unit) {
    const zero::OptimizerStates& states = optimizer->states();
    for (const Parameter& p : states.unit(unit).parameters()) {
      const CarriedParameter* before = carried.find(p);
      if (!before) {
        next.parameter_steps[p.name] = 0;
        is_cut_as_before = false;
        continue;
      }
      is_cut_as_before = is_cut_as_before && before == carried.parameters.data() + next_carried++ &&
                         !before->resized.defined() && before->offset == p.offset &&
                         before->shard == states.unit(unit).layout().shard;
      const auto steps = carried.progress.parameter_steps.find(before->name);
      if (steps != carried.progress.parameter_steps.end()) next.parameter_steps[p.name] = steps->second;
      const auto numbers = carried.progress.parameter_numbers.find(before->name);
      if (numbers != carried.progress.parameter_numbers.end()) next.parameter_numbers[p.name] = numbers->second;
      for (const auto& state : states.buffers(unit)) {
        const auto found = before->states.find(state.role);
        if (found == before->states.end() || !states.has(p, state.role)) continue;
        Tensor whole = whole_state(*before, found->second, state.role, channels.gathers(), model.device());
        if (before->resized.defined()) {
          const int64_t kept = std::min(before->numel, p.numel);
          const Tensor values = state.role == "master" ? before->resized.narrow(0, 0, kept) : Tensor();
          whole = kept_rows(whole.narrow(0, 0, kept), values, states.unit(unit).layout().dtype);
        }
        write_held(p, states.begin(unit), state.data, whole);
      }
    }
  }
  stepper->restore(next, /*moments=*/optimizer != nullptr, /*schedule=*/true);
  stepper->set_boundary(carried.boundary);
  if (!is_cut_as_before || next_carried != carried.parameters.size()) return;
  const std::vector<Tensor> now = errors();
  for (size_t i = 0; i < now.size(); ++i) now[i].copy_(carried.as_before.errors[i]);
}

void Engine::rebuild(const ModelDescription& model, const InitOptions& options) {
  const deferred::Pause pause(deferred::kKey);
  const Config config = impl_->config;
  const auto wishes = impl_->reporter.wishes();
  const int64_t step = impl_->progress.global_steps;
  InitOptions same_world = options;
  if (!same_world.world) same_world.world = impl_->channels.world();
  CarriedState carried = impl_->told("rebuild", [&] { return impl_->carry_state(model, same_world); });
  const engine::Origin before = impl_->origin;
  const auto compression = impl_->stepper->compression();
  same_world.axes = before.axes;
  InitOptions as_before = same_world;
  as_before.groups = carried.as_before.groups;
  as_before.optimizer = before.optimizer;
  impl_.reset();
  carried.make_whole();
  try {
    impl_ = std::make_unique<Impl>(model, config, same_world);
  } catch (...) {  // on all ranks alike, since they agreed on the model
    impl_ = std::make_unique<Impl>(before.model, config, as_before);
    impl_->stepper->set_compression(compression);
    impl_->told("rebuild", [&] { impl_->restore_as_before(carried); });
    impl_->reporter.resume(wishes, step);
    throw;
  }
  impl_->stepper->set_compression(compression);
  impl_->told("rebuild", [&] { impl_->adopt_state(carried); });
  impl_->reporter.resume(wishes, step);
}

}  // namespace deeptide
