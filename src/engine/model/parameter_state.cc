// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads and writes state by parameter: masters, optimizer states and gradients, whole or this rank's part.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "base/digest.h"
#include "base/libraries/format.h"
#include "engine/engine_impl.h"

namespace deeptide {

using at::Tensor;
using comm::Call;
using comm::Vote;
using sharding::Parameter;

/// A parameter, and its unit's position among the trainable units; -1 if it is not optimized.
struct Engine::Impl::StatePlace {
  const Parameter* parameter = nullptr;
  int tensor = 0;
  int unit = -1;
};

namespace {

constexpr const char* kGradient = "gradient";
constexpr const char* kMaster = "master";

int index_of(const Parameter& p) { return static_cast<int>(&p - p.unit->parameters().data()); }

}  // namespace

/// Collective. Afterwards gradients are reduced, if `role` asks for them, and masters hold what programs wrote.
Engine::Impl::StatePlace Engine::Impl::enter_state(const std::string& name, const std::string& role,
                                                   const std::function<void(const StatePlace&)>& check) {
  StatePlace place;
  const bool looks_at_gradients = role == kGradient && reducer;
  const bool collects = looks_at_gradients && !kept;  // which else holds what lies in .grad
  const auto closes = boundary->enter(Call::gather_state, [&](comm::Close& own) {
    own.rounds = reducer ? reducer->rounds_wanted() : 0;
    if (collects) own.rounds = reducer->rounds_wanted_with(intake->check_collected());
    const auto bound = model.find(name);
    TORCH_CHECK_VALUE(bound.parameter != nullptr, "the model has no parameter '", name, "'");
    const auto trainable = model.trainable();
    const auto found = std::find(trainable.begin(), trainable.end(), bound.parameter->unit);
    const bool optimized = optimizer && found != trainable.end();
    place = {bound.parameter, bound.tensor, optimized ? static_cast<int>(found - trainable.begin()) : -1};
    if (check) check(place);
  });
  if (collects) intake->take_collected();
  if (looks_at_gradients)
    reducer->finish(engine::most_rounds(closes), /*ends_micro_batch=*/false);  // also what is left in buckets
  if (role == kGradient && kept) {
    kept->agree(*boundary);
    kept->absorb();
  }
  if (optimizer) optimizer->states().refresh_masters();
  return place;
}

/// Errors: ValueError when the parameter or the role has nothing that could be written.
void Engine::Impl::check_writable(const StatePlace& place, const std::string& role) const {
  const std::string& name = place.parameter->name;
  TORCH_CHECK_VALUE(place.unit >= 0, "'", name, "' has no ", role,
                    ": it is not optimized. Write into the parameter itself, under no_grad");
  TORCH_CHECK_VALUE(role != kGradient || !stepper->keeps_gradients(), "'", name,
                    "' has no mean gradient to write: ", design.rule->name(),
                    " exchanges signs in this step, and each rank keeps its own gradient");
  std::string known = kGradient;
  for (const auto& state : optimizer->states().buffers(place.unit)) {
    if (!optimizer->states().has(*place.parameter, state.role)) continue;
    known += ", " + state.role;
    if (state.role == role) return;
  }
  if (optimizer->custom() && role != kGradient) {  // which of them there are is known where their elements are
    for (const std::string& state : optimizer->custom()->names(place.unit, index_of(*place.parameter))) {
      known += ", " + state;
      if (state == role) return;
    }
    const auto [first, last] = held_range(place);
    if (first == last) return;
  }
  TORCH_CHECK_VALUE(role == kGradient, "'", name, "' has no state '", role, "': expected one of ", known);
}

/// Collective. Returns what `unit_state` does for a state that the caller's own optimizer keeps. A rank without an
/// element of the parameter does not know which states there are.
Tensor Engine::Impl::custom_state(const StatePlace& place, const std::string& role) {
  if (!optimizer->custom()) return {};
  Tensor mine = optimizer->custom()->state(place.unit, index_of(*place.parameter), role);
  const Vote own{.failed = false, .digest = mine.defined() ? 1U : 0U};
  const auto votes = boundary->exchange(own, {"reading state", "agreeing on the optimizer's states"});
  const bool exists = std::any_of(votes.begin(), votes.end(), [](const Vote& vote) { return vote.digest != 0; });
  if (exists && !mine.defined()) mine = at::zeros_like(optimizer->states().master(place.unit).in_place());
  return mine;
}

/// This rank's flat part of a state of the whole unit, and the element at which it begins; undefined if there is none.
/// Collective.
std::pair<int64_t, Tensor> Engine::Impl::unit_state(const StatePlace& place, const std::string& role) {
  if (place.unit < 0) return {};
  if (role == kGradient) {
    if (!reducer->has_gradient()) return {};
    return {place.parameter->unit->shard_begin(), reducer->gradient(place.unit).sum().div(stepper->loss_scale())};
  }
  const zero::OptimizerStates& states = optimizer->states();
  for (const auto& state : states.buffers(place.unit)) {
    if (state.role != role || !states.has(*place.parameter, role)) continue;
    return {states.begin(place.unit), state.data.copy().to(model.device(), at::kFloat)};
  }
  const Tensor customs = custom_state(place, role);
  return {states.begin(place.unit), customs.defined() ? customs.to(model.device()) : customs};
}

/// Collective. Returns a state of the whole unit (numel,), or nothing if there is none.
Tensor Engine::Impl::whole_unit_state(const StatePlace& place, const std::string& role) {
  const Tensor mine = unit_state(place, role).second;
  const int64_t numel = place.parameter->unit->numel();
  if (!mine.defined() || mine.numel() == numel) return mine;
  const Tensor whole = at::empty({numel}, mine.options());
  gather(*place.parameter->unit, whole, mine, role + " of '" + place.parameter->name + "'");
  return whole;
}

Tensor Engine::Impl::full_state(const std::string& name, const std::string& role) {
  at::NoGradGuard no_grad;
  const StatePlace place = enter_state(name, role);
  const Tensor whole = whole_unit_state(place, role);
  if (!whole.defined()) return {};
  return place.parameter->view_of(whole, place.tensor).clone().cpu();
}

/// The elements of a parameter's state that this rank holds, in unit coordinates. Gradients follow the states: at stage
/// 0 each rank holds all.
std::pair<int64_t, int64_t> Engine::Impl::held_range(const StatePlace& place) const {
  const Parameter& p = *place.parameter;
  const int64_t begin = optimizer->states().begin(place.unit);
  const int64_t end = begin + (design.policy.shard_optimizer ? p.unit->layout().shard : p.unit->numel());
  const int64_t first = std::clamp(begin, p.offset, p.offset + p.numel);
  return {first, std::clamp(end, first, p.offset + p.numel)};
}

std::optional<LocalState> Engine::Impl::local_state(const std::string& name, const std::string& role) {
  at::NoGradGuard no_grad;
  const StatePlace place = enter_state(name, role);
  auto [begin, flat] = unit_state(place, role);
  if (!flat.defined()) return std::nullopt;
  if (!design.policy.shard_optimizer && flat.numel() != place.parameter->unit->numel()) {
    begin = 0;
    flat = whole_unit_state(place, role);
  }
  const auto [first, last] = held_range(place);
  const Tensor values = flat.narrow(0, first == last ? 0 : first - begin, last - first);
  return LocalState{first - place.parameter->offset, values.clone().cpu()};
}

void Engine::Impl::set_full_state(const std::string& name, const std::string& role, const Tensor& value) {
  at::NoGradGuard no_grad;
  const StatePlace place = enter_state(name, role, [&](const StatePlace& at) {
    check_writable(at, role);
    const auto shape = at.parameter->tensors[at.tensor].sizes();
    TORCH_CHECK_VALUE(value.defined() && value.sizes() == shape, "the new ", role, " of '", name, "': got shape ",
                      value.defined() ? value.sizes() : at::IntArrayRef(), ", expected ", shape);
  });
  const Parameter& p = *place.parameter;
  const Tensor unit = at::empty({p.unit->numel()}, at::TensorOptions().dtype(at::kFloat).device(model.device()));
  p.view_of(unit, place.tensor).copy_(value);
  const Tensor flat = unit.narrow(0, p.offset, p.numel);
  const Tensor values = flat.cpu();
  const Vote own{.failed = false, .digest = digest_of_bytes(values.const_data_ptr(), values.nbytes())};
  for (const Vote& vote : boundary->exchange(own, {"writing state", "comparing the values to write"})) {
    TORCH_CHECK_VALUE(vote.digest == own.digest, "the new ", role, " of '", name,
                      "' differs between ranks: every rank must pass the same values. Nothing was changed");
  }
  const auto [first, last] = held_range(place);
  write_state(place, role, first, flat.narrow(0, first - p.offset, last - first));
}

void Engine::Impl::broadcast(const Tensor& values, int source) {
  at::NoGradGuard no_grad;
  boundary->enter(Call::gather_state, [&](comm::Close&) {
    TORCH_CHECK_VALUE(source >= 0 && source < channels.gathers().size(), "broadcast: got rank ", source,
                      " as the source, expected one ", "of 0 to ", channels.gathers().size() - 1);
  });
  // The channel wants contiguous memory on the engine's device.
  const Tensor sent = values.to(model.device()).contiguous();
  auto pending = channels.gathers().broadcast(sent, source);
  channels.gathers().wait(pending, {"writing parameters", format_text("broadcasting rank {}'s values", source)});
  if (!sent.is_same(values)) const_cast<Tensor&>(values).copy_(sent);
}

double Engine::Impl::mean(double value) {
  at::NoGradGuard no_grad;
  boundary->enter(Call::gather_state);
  comm::Group& control = channels.control();
  const Tensor own = at::full({1}, value, at::kDouble), all = at::empty({control.size()}, at::kDouble);
  auto pending = control.all_gather(all, own);
  control.wait(pending, {"averaging", "gathering the ranks' values"});
  return all.mean().item<double>();
}

void Engine::Impl::set_local_state(const std::string& name, const std::string& role, const Tensor& values) {
  at::NoGradGuard no_grad;
  const StatePlace place = enter_state(name, role, [&](const StatePlace& at) {
    check_writable(at, role);
    const auto [first, last] = held_range(at);
    TORCH_CHECK_VALUE(values.defined() && values.numel() == last - first, "this rank's new ", role, " of '", name,
                      "': got ", values.defined() ? values.numel() : 0, " elements, expected the ", last - first,
                      " that this rank holds");
  });
  const auto [first, last] = held_range(place);
  write_state(place, role, first, values.reshape({-1}).to(model.device(), at::kFloat));
}

/// Collective. Writes elements [first, first + values) of the unit's state on this rank, and publishes what follows.
void Engine::Impl::write_state(const StatePlace& place, const std::string& role, int64_t first, const Tensor& values) {
  const sharding::Unit& unit = *place.parameter->unit;
  if (role == kGradient) {
    const int64_t shard_begin = unit.shard_begin(), shard_end = shard_begin + unit.layout().shard;
    const int64_t from = std::clamp(first, shard_begin, shard_end);
    const int64_t to = std::clamp(first + values.numel(), from, shard_end);
    const Tensor mine = values.narrow(0, from == to ? 0 : from - first, to - from);
    reducer->set_gradient(place.unit, index_of(*place.parameter), from - shard_begin, mine.mul(stepper->loss_scale()));
    if (kept && kept->shown()) kept->show(*boundary);
    return;
  }
  optimizer->states().changing(place.unit);
  if (optimizer->custom()) optimizer->custom()->write(place.unit, index_of(*place.parameter), role, first, values);
  for (const auto& state : optimizer->states().buffers(place.unit)) {
    if (state.role == role) state.data.copy_from(values, first - optimizer->states().begin(place.unit));
  }
  if (role != kMaster) return;
  residency->release_all();
  optimizer->publish_parameter(place.unit, index_of(*place.parameter),
                               channels.all(engine::Channels::Purpose::gathers));
}

}  // namespace deeptide
