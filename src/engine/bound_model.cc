// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds named tensors to units.
#include "engine/bound_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/log.h"
namespace deeptide::engine {

using at::Tensor;
using sharding::Parameter;
using sharding::ParameterSpec;
using sharding::Unit;
using sharding::UnitLayout;
using sharding::UnitMemory;

namespace {

/// Parameters with exactly equal memory are one logical parameter with several names.
std::vector<Parameter> distinct_parameters(const std::vector<NamedTensor>& named) {
  std::vector<Parameter> distinct;
  std::map<const void*, std::vector<int>> by_storage;
  std::set<std::string> names;
  for (const auto& [name, tensor] : named) {
    TORCH_CHECK_VALUE(tensor.defined(), "parameter '", name, "' is undefined");
    TORCH_CHECK_VALUE(names.insert(name).second, "parameter name '", name, "' occurs twice in the model's description");
    TORCH_CHECK_VALUE(!tensor.is_meta(), "parameter '", name,
                      "' is on the meta device and has no values; give the "
                      "model memory and values first: model.to_empty(device=…), then initialise it");
    TORCH_CHECK_VALUE(!tensor.has_storage() || !sharding::is_bound(tensor.storage()), "parameter '", name,
                      "' already belongs to another engine; one model has one engine");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.has_storage(), "parameter '", name, "' is ",
                      tensor.layout(), "; only dense parameters are supported");
    TORCH_CHECK_VALUE(c10::isFloatingType(tensor.scalar_type()), "parameter '", name, "' has type ",
                      tensor.scalar_type(), "; parameters must be of a floating type (make it a buffer)");
    Parameter* same = nullptr;
    if (tensor.numel() > 0) {
      for (int i : by_storage[tensor.storage().unsafeGetStorageImpl()]) {
        const Tensor& other = distinct[i].tensors.front();
        const int64_t begin = tensor.storage_offset(), other_begin = other.storage_offset();
        if (begin == other_begin && tensor.numel() == other.numel()) same = &distinct[i];
        const bool apart = begin + tensor.numel() <= other_begin || other_begin + other.numel() <= begin;
        TORCH_CHECK_VALUE(same || apart, "parameters '", distinct[i].name, "' and '", name,
                          "' overlap in memory without being the same; make one of them a clone");
      }
    }
    if (same != nullptr) {
      same->aliases.push_back(name);
      const bool known = std::any_of(same->tensors.begin(), same->tensors.end(),
                                     [&t = tensor](const Tensor& o) { return o.is_same(t); });
      if (!known) same->tensors.push_back(tensor);
      continue;
    }
    by_storage[tensor.storage().unsafeGetStorageImpl()].push_back(static_cast<int>(distinct.size()));
    Parameter p;
    p.name = name;
    p.tensors = {tensor};
    p.numel = tensor.numel();
    distinct.push_back(std::move(p));
  }
  return distinct;
}

at::Device common_device(const std::vector<Parameter>& parameters) {
  TORCH_CHECK_VALUE(!parameters.empty(), "the model has no parameters: nothing to train");
  const Parameter& first = parameters.front();
  for (const Parameter& p : parameters) {
    TORCH_CHECK_VALUE(p.tensors.front().device() == first.tensors.front().device(), "parameter '", p.name, "' is on ",
                      p.tensors.front().device(), " and '", first.name, "' on ", first.tensors.front().device(),
                      "; move the whole model to one device first");
  }
  return first.tensors.front().device();
}

void assign_groups(std::vector<Parameter>& parameters, const std::vector<ParameterGroup>& groups) {
  std::map<std::string, Parameter*> by_name;
  for (Parameter& p : parameters) {
    by_name[p.name] = &p;
    for (const auto& alias : p.aliases) by_name[alias] = &p;
  }
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    for (const auto& name : groups[g].parameters) {
      const auto found = by_name.find(name);
      TORCH_CHECK_VALUE(found != by_name.end(), "optimizer group ", g, " names parameter '", name,
                        "', which the model does not have");
      Parameter& p = *found->second;
      TORCH_CHECK_VALUE(p.group < 0 || p.group == g, "parameter '", name, "' is in optimizer groups ", p.group, " and ",
                        g);
      p.group = g;
    }
  }
  for (Parameter& p : parameters) {
    const bool trainable = p.tensors.front().requires_grad();
    if (!trainable) p.group = -1;
    if (trainable && groups.empty()) p.group = 0;
  }
}

bool is_trained(const Parameter& p) { return p.tensors.front().requires_grad() && p.group >= 0; }

std::vector<ParameterSpec> specs_of(const std::vector<Parameter>& parameters, at::ScalarType compute) {
  std::vector<ParameterSpec> specs;
  for (const Parameter& p : parameters) {
    const auto own = p.tensors.front().scalar_type();
    // bf16 training casts fp32 parameters; a type chosen by hand (fp64, fp16, frozen bf16) is kept.
    const auto dtype = own == at::kFloat ? compute : own;
    specs.push_back({p.name, p.numel, dtype, is_trained(p), p.group});
  }
  return specs;
}

void check_trainable(const std::vector<ParameterSpec>& specs, const std::string& trained_by) {
  const bool any = std::any_of(specs.begin(), specs.end(), [](const auto& spec) { return spec.trainable; });
  TORCH_CHECK_VALUE(any || trained_by.empty(),
                    "the model has no trainable parameters (requires_grad is false on all of its ", specs.size(),
                    "), but ", trained_by, " configures an optimizer");
  for (const auto& spec : specs) {
    TORCH_CHECK_VALUE(
        !spec.trainable || spec.dtype == at::kFloat || spec.dtype == at::kBFloat16, "parameter '", spec.name,
        "' is trainable and of type ", spec.dtype,
        "; trainable parameters are fp32 or bf16 (fp16 comes with loss scaling): call .float() on it first");
  }
}

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

/// Casts and makes contiguous in place; tensors keep their identity. Precedes all hooks: a cast makes new accumulators.
void prepare(Parameter& p, at::ScalarType dtype) {
  for (Tensor& t : p.tensors) {
    if (t.scalar_type() != dtype || !t.is_contiguous()) t.set_data(t.detach().to(dtype).contiguous());
  }
}

}  // namespace

BoundModel::BoundModel(const ModelDescription& model, const std::vector<ParameterGroup>& groups,
                       const BindOptions& options, host::Host& host, comm::Group& gathers,
                       const std::shared_ptr<device::Ledger>& ledger)
    : buffers_(model.buffers) {
  at::NoGradGuard no_grad;
  auto parameters = distinct_parameters(model.parameters);
  device_ = common_device(parameters);
  assign_groups(parameters, groups);
  const auto specs = specs_of(parameters, options.compute_dtype);
  check_trainable(specs, options.trained_by);
  std::vector<sharding::ModuleSpec> modules;
  for (const auto& module : model.modules) modules.push_back({module.path, module.type});
  const comm::Team& team = gathers.team();
  auto layouts = sharding::build_layout(specs, modules, {team.size(), options.max_unit_numel});
  if (device_.is_cpu() && team.size() > 1 && host.holds_all()) share_memory(layouts, host);

  int64_t persistent = 0;
  for (UnitLayout& layout : layouts) {
    std::vector<Parameter> members;
    for (const auto& slot : layout.slots) {
      Parameter& p = parameters[slot.parameter];
      prepare(p, layout.dtype);
      p.offset = slot.offset;
      members.push_back(std::move(p));
    }
    const bool persists =
        layout.used <= options.persistence_threshold && persistent + layout.used <= options.model_persistence_threshold;
    if (persists) persistent += layout.used;
    const bool sharded = options.shard_parameters && team.size() > 1 && !persists;
    const auto memory = arena_ ? UnitMemory::shared : sharded ? UnitMemory::sharded : UnitMemory::whole;
    units_.push_back(std::make_unique<Unit>(static_cast<int>(units_.size()), std::move(layout), std::move(members),
                                            sharding::UnitPlacement{memory, team, team}));
    if (!arena_) bind_apart(*units_.back(), gathers, ledger);
    remember(*units_.back());
  }
  if (!arena_) return;
  // Each rank first takes its shards' pages, so that they lie near it; then rank 0 writes.
  const auto places = shared_places(units_);
  for (size_t u = 0; u < units_.size(); ++u) {
    arena_->memory()->populate(places[u] + units_[u]->shard_begin() * item_size(*units_[u]),
                               units_[u]->layout().shard * item_size(*units_[u]));
  }
  gathers.barrier({"start", "taking memory"});
  for (size_t u = 0; u < units_.size(); ++u) bind_shared(*units_[u], places[u], ledger);
  gathers.barrier({"start", "waiting for rank 0's parameters"});
}

/// Maps memory for all units and, generously, for all gradient buckets that may wait for slower ranks.
void BoundModel::share_memory(const std::vector<UnitLayout>& layouts, host::Host& host) {
  constexpr int64_t kBucketsOfModel = 16, kSpare = 64 << 20;
  int64_t parameters = 0, gradients = 0;
  for (const UnitLayout& layout : layouts) {
    parameters += host::Arena::padded(layout.numel * static_cast<int64_t>(c10::elementSize(layout.dtype)));
    gradients += layout.numel * static_cast<int64_t>(sizeof(float));
  }
  std::string why_not;
  arena_ = host::Arena::create(host, parameters, kBucketsOfModel * gradients + kSpare, why_not);
  if (!arena_ && host.index() == 0) log(LogLevel::warning, "ranks of one host do not share parameters: " + why_not);
}

void BoundModel::bind_apart(Unit& unit, comm::Group& gathers, const std::shared_ptr<device::Ledger>& ledger) {
  const auto role = unit.memory() == UnitMemory::sharded ? device::Role::gathered : device::Role::parameters;
  Tensor whole = device::allocate_flat(ledger, role, unit.numel(), unit.layout().dtype, device_);
  unit.pack(whole);
  auto pending = gathers.broadcast(whole, 0);
  gathers.wait(pending, {"start", "broadcasting unit '" + unit.layout().name + "' from rank 0"});
  unit.adopt(whole, ledger);
}

/// Counts this rank's shard only: together the ranks count the memory once.
void BoundModel::bind_shared(Unit& unit, int64_t offset, const std::shared_ptr<device::Ledger>& ledger) {
  const auto& layout = unit.layout();
  const auto& memory = arena_->memory();
  const int64_t shard_bytes = layout.shard * item_size(unit);
  if (unit.shard_over().index() == 0) unit.pack(memory->view(offset, layout.numel, layout.dtype));
  ledger->add(device::Role::parameters, shard_bytes);
  Tensor shard = memory->view(offset + unit.shard_begin() * item_size(unit), layout.shard, layout.dtype,
                              [ledger, shard_bytes] { ledger->add(device::Role::parameters, -shard_bytes); });
  unit.adopt_shared(std::move(shard),
                    std::make_shared<device::PrivateView>(memory, offset, layout.numel * item_size(unit)));
}

void BoundModel::remember(const Unit& unit) {
  for (int i = 0; i < static_cast<int>(unit.parameters().size()); ++i) {
    const Parameter& p = unit.parameters()[i];
    by_name_[p.name] = {unit.index(), i};
    for (const auto& alias : p.aliases) by_name_[alias] = {unit.index(), i};
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

const Parameter* BoundModel::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &units_[found->second.first]->parameters()[found->second.second];
}

int64_t BoundModel::num_elements() const {
  int64_t total = 0;
  for (const auto& unit : units_) total += unit->layout().used;
  return total;
}

int64_t BoundModel::predicted_bytes() const {
  int64_t bytes = 0;
  for (const auto& unit : units_) bytes += unit->resident_bytes();
  return bytes;
}

int64_t BoundModel::num_trainable() const {
  int64_t total = 0;
  for (const auto& unit : units_) total += unit->layout().trainable ? unit->layout().used : 0;
  return total;
}

void BoundModel::check_bound() const {
  for (const auto& unit : units_) {
    for (const Parameter& p : unit->parameters()) {
      TORCH_CHECK_VALUE(
          p.tensors.front().storage().unsafeGetStorageImpl() == p.storage.get(), "parameter '", p.name,
          "' got other memory after initialize (module.to(), .data = …): the engine no longer sees it. "
          "Change device and type before initialize; change values with parameter.copy_() under no_grad.");
    }
  }
}

}  // namespace deeptide::engine
