// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds named tensors to units.
#include "engine/bind/bound_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/log.h"
#include "deferred/key.h"
#include "deferred/memory.h"
#include "engine/bind/file_values.h"
#include "engine/design/logical_parameters.h"
#include "zero/states/optimizer_states.h"

namespace deeptide::engine {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;
using sharding::UnitLayout;
using sharding::UnitMemory;

namespace {

int64_t item_size(const Unit& unit) { return static_cast<int64_t>(c10::elementSize(unit.layout().dtype)); }

/// Returns where each unit begins in the shared memory, in bytes.
std::vector<int64_t> shared_places(const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<int64_t> places;
  int64_t next = 0;
  for (const auto& unit : units) {
    places.push_back(next);
    next += host::Arena::padded(unit->numel() * item_size(*unit));
  }
  return places;
}

/// Casts in place, and makes the first contiguous; tensors keep their identity, and ties that order the elements
/// differently their strides. Precedes all hooks: a cast makes new accumulators.
void prepare(Parameter& p, at::ScalarType dtype) {
  const bool reordered = !p.tensors.front().is_contiguous();
  for (Tensor& t : p.tensors) {
    if (t.scalar_type() != dtype) t.set_data(t.detach().to(dtype));
    if (reordered) t.set_data(t.detach().contiguous());
  }
}

/// Makes the values of a parameter that was built under zero.Init, on the rank whose values count.
void make_values(Parameter& p, at::ScalarType dtype, bool counts) {
  for (Tensor& t : p.tensors) {
    if (!deferred::is_deferred(t)) continue;
    const bool packed = counts && t.is_same(p.tensors.front());
    // The others never touch what they are given here.
    const Tensor values =
        packed ? deferred::values_as(t, dtype) : at::empty_strided(t.sizes(), t.strides(), t.options().dtype(dtype));
    deferred::set_key(t, false);  // torch changes a device's tensors for others of the same keys only
    t.set_data(values);
  }
}

void make_values(const std::vector<NamedTensor>& buffers) {
  for (const NamedTensor& buffer : buffers) {
    deferred::materialize(buffer.tensor);
    if (deferred::has_key(buffer.tensor)) deferred::set_key(buffer.tensor, false);
  }
}

/// A unit at a time: what was built under zero.Init is never whole at once.
void take_values(Unit& unit, bool counts) {
  for (Parameter& p : unit.parameters()) {
    make_values(p, unit.layout().dtype, counts);
    prepare(p, unit.layout().dtype);
  }
}

}  // namespace

BoundModel::BoundModel(const ModelDescription& model, const Design& design, const BufferTypes& buffers,
                       std::shared_ptr<host::Arena> arena, Channels& channels,
                       const std::shared_ptr<device::Ledger>& ledger)
    : arena_(std::move(arena)), device_(design.model.device) {
  at::NoGradGuard no_grad;
  auto parameters = distinct_parameters(model.parameters);
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].group = design.model.parameters[i].group;
  warn_of_views(parameters);
  for (const NamedTensor& parameter : model.parameters) {
    if (stays_whole(parameter.tensor)) make_values(std::vector{parameter});
  }
  make_values(model.buffers);
  make_values(model.transient_buffers);
  buffers_ = cast_buffers(model, design.compute_dtype, buffers, KeepsFullPrecision(model.modules));
  if (design.offload) {
    offloaded_ = std::make_unique<zero::OffloadedParameters>(*design.offload, design.sharded_layouts(),
                                                             design.shard_places(), ledger, device_);
  }
  for (const UnitRow& row : design.units) {
    std::vector<Parameter> members;
    for (const auto& slot : row.layout.slots) {
      Parameter& p = parameters[slot.parameter];
      p.offset = slot.offset;
      const auto slice = design.topology.slices.find(p.name);
      if (slice != design.topology.slices.end()) p.slice = slice->second;
      members.push_back(std::move(p));
    }
    units_.push_back(
        std::make_unique<Unit>(static_cast<int>(units_.size()), row.layout, std::move(members), row.place));
    remember(*units_.back());
  }
  if (!arena_) {
    const auto of_files = find_units_of_files(channels, units_);
    for (size_t u = 0; u < units_.size(); ++u) {
      const UnitRow& row = design.units[u];
      auto& holders = channels.of(row.place.reduce_over, Channels::Purpose::gathers);
      bind_apart(*units_[u], row.shard, holders, ledger, of_files[u]);
    }
    deferred::release_idle_memory();
    return;
  }
  comm::Group& gathers = channels.gathers();
  // Each rank first takes its shards' pages, so that they lie near it; then rank 0 writes.
  const auto places = shared_places(units_);
  for (size_t u = 0; u < units_.size(); ++u) {
    arena_->memory()->populate(places[u] + units_[u]->shard_begin() * item_size(*units_[u]),
                               units_[u]->layout().shard * item_size(*units_[u]));
  }
  gathers.barrier({"start", "taking memory"});
  for (size_t u = 0; u < units_.size(); ++u) bind_shared(*units_[u], places[u], ledger);
  deferred::release_idle_memory();
  gathers.barrier({"start", "waiting for rank 0's parameters"});
}

/// `holders`: all ranks that have a slice of the unit, or a copy.
void BoundModel::bind_apart(Unit& unit, const zero::ShardPlace& place, comm::Group& holders,
                            const std::shared_ptr<device::Ledger>& ledger, bool is_of_files) {
  const auto role = unit.memory() == UnitMemory::sharded ? device::Role::gathered : device::Role::parameters;
  const bool counts = holders.index() == 0 && !is_of_files;
  if (!is_of_files) take_values(unit, counts);
  Tensor whole = device::allocate_flat(ledger, role, unit.numel(), unit.layout().dtype, device_);
  if (is_of_files) {
    read_own_slice(unit, holders, whole);
    take_values(unit, counts);
  } else {
    if (counts) unit.pack(whole);
    auto pending = holders.broadcast(whole, 0);
    holders.wait(pending, {"start", "broadcasting unit '" + unit.layout().name + "' from rank 0"});
  }
  sharding::ShardPlacement placement;
  if (offloaded_) placement = [&](const UnitLayout& layout) { return offloaded_->place(layout, place); };
  unit.adopt(whole, ledger, placement);
}

/// Counts this rank's shard only: together the ranks count the memory once.
void BoundModel::bind_shared(Unit& unit, int64_t offset, const std::shared_ptr<device::Ledger>& ledger) {
  const auto& layout = unit.layout();
  const auto& memory = arena_->memory();
  const int64_t shard_bytes = layout.shard * item_size(unit);
  const bool counts = unit.shard_over().index() == 0;
  ledger->check_room(device::Role::parameters, shard_bytes);
  take_values(unit, counts);
  if (counts) unit.pack(memory->view(offset, layout.numel, layout.dtype));
  ledger->add(device::Role::parameters, shard_bytes);
  Tensor shard = memory->view(offset + unit.shard_begin() * item_size(unit), layout.shard, layout.dtype,
                              [ledger, shard_bytes] { ledger->add(device::Role::parameters, -shard_bytes); });
  unit.adopt_shared(std::move(shard),
                    std::make_shared<device::PrivateView>(memory, offset, layout.numel * item_size(unit)));
}

void BoundModel::remember(const Unit& unit) {
  for (int i = 0; i < static_cast<int>(unit.parameters().size()); ++i) {
    const Parameter& p = unit.parameters()[i];
    by_name_[p.name] = {unit.index(), i, 0};
    for (const auto& alias : p.aliases) by_name_[alias.name] = {unit.index(), i, alias.tensor};
    for (size_t t = 0; t < p.tensors.size(); ++t) {
      by_tensor_[p.tensors[t].unsafeGetTensorImpl()] = {unit.index(), i, static_cast<int>(t)};
    }
  }
}

std::vector<Unit*> BoundModel::trainable() const {
  std::vector<Unit*> units;
  for (const auto& unit : units_) {
    if (unit->layout().trainable) units.push_back(unit.get());
  }
  return units;
}

std::vector<Unit*> BoundModel::sharded() const {
  std::vector<Unit*> units;
  for (const auto& unit : units_) units.push_back(unit->memory() == UnitMemory::sharded ? unit.get() : nullptr);
  return units;
}

std::vector<const Parameter*> BoundModel::parameters() const {
  std::vector<const Parameter*> parameters;
  for (const auto& unit : units_) {
    for (const Parameter& p : unit->parameters()) parameters.push_back(&p);
  }
  return parameters;
}

BoundName BoundModel::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return {};
  const Place& place = found->second;
  return {&units_[place.unit]->parameters()[place.parameter], place.tensor};
}

BoundName BoundModel::find(const Tensor& tensor) const {
  const auto found = by_tensor_.find(tensor.unsafeGetTensorImpl());
  if (found == by_tensor_.end()) return {};
  const Place& place = found->second;
  return {&units_[place.unit]->parameters()[place.parameter], place.tensor};
}

int64_t BoundModel::num_elements() const {
  int64_t total = 0;
  for (const auto& unit : units_) total += unit->layout().used;
  return total;
}

int64_t BoundModel::predicted_bytes() const {
  int64_t bytes = 0;
  for (const auto& unit : units_) bytes += zero::lies_off_device(*unit) ? 0 : unit->resident_bytes();
  return bytes + (offloaded_ && device_.is_cpu() ? offloaded_->staging_bytes() : 0);
}

int64_t BoundModel::off_device_bytes() const { return offloaded_ ? offloaded_->off_device_bytes() : 0; }

int64_t BoundModel::num_trainable() const {
  int64_t total = 0;
  for (const auto& unit : units_) total += unit->layout().trainable ? unit->layout().used : 0;
  return total;
}

void BoundModel::check_bound(bool may_resize) const {
  if (!may_resize) check_sizes();
  for (const auto& unit : units_) {
    const Parameter* moved = unit->moved(/*but_resized=*/true);
    TORCH_CHECK_VALUE(
        moved == nullptr, "parameter '", moved ? moved->name : "",
        "' got other memory after initialize (module.to(), .data = …, share_memory(), or sending the model "
        "to another process): the engine no longer sees it. Change device and type before initialize; "
        "change values with parameter.copy_() under no_grad; send a copy.deepcopy(model) to a process.");
  }
}

void BoundModel::check_sizes() const {
  for (const auto& unit : units_) {
    for (const Parameter& p : unit->parameters()) {
      TORCH_CHECK_VALUE(!p.is_resized(), "parameter '", p.name, "' has the shape ", p.tensors.front().sizes(),
                        " now, and had ", at::IntArrayRef(p.sizes.front()),
                        " when the engine took it (resize_token_embeddings() after initialize does this): call "
                        "engine.rebuild() on every rank after the change and before the next forward. Rows that stay "
                        "keep their moments");
    }
  }
}

void BoundModel::check_trained() const {
  for (const auto& unit : units_) {
    if (unit->layout().trainable) continue;
    for (const Parameter& p : unit->parameters()) {
      TORCH_CHECK_VALUE(
          p.required_grad || !p.tensors.front().requires_grad(), "parameter '", p.name,
          "' was frozen at initialize and requires grad now: this engine has no optimizer state for it "
          "and would never train it. Call engine.rebuild() on every rank after unfreezing it, before the next "
          "forward, or let it require grad before initialize and freeze it afterwards.");
    }
  }
}

void BoundModel::note_external_writes() {
  for (const auto& unit : units_) unit->note_external_writes();
}

}  // namespace deeptide::engine
