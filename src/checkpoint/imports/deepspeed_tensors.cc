// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Weights of the module, states that are not sharded, and the universal form, of DeepSpeed's checkpoints.
#include "checkpoint/imports/deepspeed_tensors.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <tuple>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"

namespace deeptide::checkpoint {

using Kind = PickleValue::Kind;

namespace {

/// A tensor of the module under its first name.
struct ModuleTensor {
  std::string name;
  TorchTensor tensor;
  bool buffer = false;
};

std::set<std::string> texts_of(const PickleValue* list) {
  std::set<std::string> texts;
  if (list == nullptr) return texts;
  for (const PickleValue* text : list->items) texts.insert(text->text);
  for (const auto& [key, value] : list->entries) texts.insert(key->text);
  return texts;
}

/// Names that share their elements with one before them are left out: tied weights.
std::vector<ModuleTensor> module_tensors(const TorchFile& model) {
  std::vector<ModuleTensor> tensors;
  const PickleValue* module = model.root().find("module");
  if (module == nullptr || !module->is_mapping()) return tensors;
  const std::set<std::string> buffers = texts_of(model.root().find("buffer_names"));
  const std::set<std::string> aliases = texts_of(model.root().find("shared_params"));
  std::set<std::tuple<int64_t, Shape, Shape>> seen;
  for (const auto& [name, value] : module->entries) {
    const auto tensor = model.tensor(*value);
    if (!name->is(Kind::text) || !tensor || aliases.contains(name->text)) continue;
    if (tensor->numel() > 0 && !seen.insert({tensor->offset, tensor->shape, tensor->strides}).second) continue;
    tensors.push_back({name->text, *tensor, buffers.contains(name->text)});
  }
  return tensors;
}

struct NumberedState {
  TorchTensor master;
  bool has_master = false;
  const PickleValue* states = nullptr;
  Shape shape;
};

/// Matches the shapes of a group's states with those of the module's parameters, in order: from the front, and from
/// the back. Both agree when there is one way only.
std::vector<size_t> match(const TorchFile& model, const std::vector<NumberedState>& group,
                          const std::vector<ModuleTensor>& parameters) {
  std::vector<size_t> front, back;
  for (size_t i = 0; i < parameters.size() && front.size() < group.size(); ++i) {
    if (parameters[i].tensor.shape == group[front.size()].shape) front.push_back(i);
  }
  for (size_t i = parameters.size(); i-- > 0 && back.size() < group.size();) {
    if (parameters[i].tensor.shape == group[group.size() - 1 - back.size()].shape) back.push_back(i);
  }
  std::reverse(back.begin(), back.end());
  if (front.size() != group.size() || front != back) {
    throw CheckpointError("DeepSpeed's checkpoint " + model.path() +
                          " does not say which parameter each of its optimizer's states is of (stage 0 saves numbers "
                          "only, and shapes fit several); save it from a run with ZeRO stage 1");
  }
  return front;
}

void add_states(const TorchFile& model, const std::string& file, const NumberedState& numbered,
                const ModuleTensor& parameter, ForeignTable& table) {
  const TensorId id{parameter.name, Role::master()};
  const TorchTensor& master = numbered.has_master ? numbered.master : parameter.tensor;
  table.add_whole(id, file, master);
  for (const auto& [key, value] : numbered.states->entries) {
    if (!key->is(Kind::text)) continue;
    const auto tensor = model.tensor(*value);
    if (key->text == "step") {
      if (const auto steps = model.number(*value)) table.count_steps(parameter.name, *steps);
    } else if (tensor && tensor->shape == parameter.tensor.shape) {
      const auto role = table.role_of(key->text);
      if (role) table.add_whole({parameter.name, *role}, file, *tensor);
    }
  }
}

/// The tensor of a universal file, which may say more of it.
std::optional<TorchTensor> universal_tensor(const TorchFile& file) {
  const PickleValue* value = file.root().find("param");
  return file.tensor(value == nullptr ? file.root() : *value);
}

std::map<std::string, Shape> trained_shapes(const TorchFile& model) {
  std::map<std::string, Shape> shapes;
  const PickleValue* groups = model.root().find("param_shapes");
  if (groups == nullptr) return shapes;
  for (const PickleValue* group : groups->items) {
    for (const auto& [name, value] : group->entries) {
      const auto shape = shape_of(*value);
      if (shape && name->is(Kind::text)) shapes.emplace(name->text, *shape);
    }
  }
  return shapes;
}

void add_universal(const DeepspeedFolder& folder, const std::string& name, const Shape& shape, ForeignTable& table) {
  const std::string place = "zero/" + name;
  for (const std::string& file_name : list_folder(folder.file(place))) {
    if (!file_name.ends_with(".pt")) continue;
    const std::string state = file_name.substr(0, file_name.size() - 3);
    const TorchFile file(folder.file(place + "/" + file_name));
    if (state == "step") {
      if (const auto steps = file.number(file.root())) table.count_steps(name, *steps);
      continue;
    }
    const auto role = state == "fp32" ? std::optional(Role::master()) : table.role_of(state);
    const auto tensor = universal_tensor(file);
    if (!role || !tensor || (tensor->shape.empty() && !shape.empty())) continue;
    table.add({name, *role}, shape, Region::range(0, numel_of(shape, folder.path)),
              {file, place + "/" + file_name, *tensor});
  }
}

}  // namespace

const PickleValue& member(const TorchFile& file, const PickleValue& mapping, const char* key) {
  const PickleValue* found = mapping.find(key);
  if (found == nullptr || found->is(Kind::none)) {
    malformed(file.path(), std::string("it has no '") + key + "', as DeepSpeed 0.7 and later write it");
  }
  return *found;
}

const PickleValue* base_optimizer(const PickleValue& states) {
  for (const char* key : {"base_optimizer_state", "optimizer_state_dict"}) {
    const PickleValue* found = states.find(key);
    if (found != nullptr && found->find("param_groups") != nullptr) return found;
  }
  return states.find("param_groups") == nullptr ? nullptr : &states;
}

int64_t integer_in(const TorchFile& file, const PickleValue& value) {
  const auto number = file.number(value);
  if (!number || std::nearbyint(*number) != *number || std::abs(*number) > 9e15) {
    malformed(file.path(), "a count of it is no whole number");
  }
  return static_cast<int64_t>(*number);
}

void read_unsharded_states(const TorchFile& model, const std::string& file, ForeignTable& table) {
  const PickleValue* optimizer = model.root().find("optimizer");
  const PickleValue* base = optimizer == nullptr ? nullptr : base_optimizer(*optimizer);
  if (base == nullptr) return;
  std::vector<ModuleTensor> parameters = module_tensors(model);
  std::erase_if(parameters, [](const ModuleTensor& tensor) { return tensor.buffer; });
  const PickleValue* masters = optimizer->find("fp32_groups");
  const PickleValue* by_number = base->find("state");
  std::map<int64_t, const PickleValue*> states;
  if (by_number != nullptr) {
    for (const auto& [key, value] : by_number->entries) states[key->integer] = value;
  }
  size_t number_of_group = 0;
  for (const PickleValue* group : member(model, *base, "param_groups").items) {
    std::vector<NumberedState> numbered;
    for (const PickleValue* number : member(model, *group, "params").items) {
      NumberedState state;
      const auto found = states.find(integer_in(model, *number));
      if (found == states.end()) return;  // saved before the first step: there are no states yet
      state.states = found->second;
      if (masters != nullptr && number_of_group < masters->items.size() &&
          numbered.size() < masters->items[number_of_group]->items.size()) {
        const auto master = model.tensor(*masters->items[number_of_group]->items[numbered.size()]);
        state.has_master = master.has_value();
        if (master) state.master = *master;
      }
      for (const auto& [key, value] : state.states->entries) {
        const auto tensor = model.tensor(*value);
        if (tensor && tensor->shape.size() >= state.shape.size()) state.shape = tensor->shape;
      }
      if (state.has_master) state.shape = state.master.shape;
      numbered.push_back(std::move(state));
    }
    const std::vector<size_t> places = match(model, numbered, parameters);
    for (size_t i = 0; i < places.size(); ++i) add_states(model, file, numbered[i], parameters[places[i]], table);
    ++number_of_group;
  }
}

void read_universal_states(const DeepspeedFolder& folder, const TorchFile& model, ForeignTable& table) {
  for (const auto& [name, shape] : trained_shapes(model)) {
    if (!is_folder(folder.file("zero/" + name)) || name.find('/') != std::string::npos || name.starts_with(".")) {
      throw CheckpointError("DeepSpeed's universal checkpoint " + folder.path + " has nothing of '" + name + "'");
    }
    add_universal(folder, name, shape, table);
  }
}

void read_module(const DeepspeedFolder& folder, const TorchFile& model, ForeignTable& table) {
  const std::string& file = folder.models.front();
  const PickleValue* frozen = model.root().find("frozen_param_shapes");
  const std::set<std::string> elsewhere = texts_of(frozen);
  const bool sliced = folder.models.size() > 1 || file.starts_with("zero_pp_rank_");
  for (const ModuleTensor& tensor : module_tensors(model)) {
    // At stage 3 parameters are empty in the module.
    if (table.has(tensor.name) || (sliced && (!tensor.buffer || elsewhere.contains(tensor.name)))) continue;
    table.add_whole({tensor.name, tensor.buffer ? Role::buffer() : Role::param()}, file, tensor.tensor);
  }
  if (!sliced || frozen == nullptr) return;
  const auto world = static_cast<int64_t>(folder.models.size());
  for (int64_t rank = 0; rank < world; ++rank) {
    const std::string& name = folder.models[static_cast<size_t>(rank)];
    const TorchFile part(folder.file(name));
    const PickleValue& fragments = member(part, part.root(), "frozen_param_fragments");
    for (const auto& [parameter, value] : frozen->entries) {
      const auto shape = shape_of(*value);
      const PickleValue* fragment = fragments.find(parameter->text);
      const auto tensor = fragment == nullptr ? std::nullopt : part.tensor(*fragment);
      if (!shape || !tensor) malformed(part.path(), "it has no slice of '" + parameter->text.substr(0, 80) + "'");
      const int64_t numel = numel_of(*shape, part.path()), share = (numel + world - 1) / world;
      const int64_t begin = std::min(rank * share, numel), end = std::min(begin + share, numel);
      table.add({parameter->text, Role::param()}, *shape, Region::range(begin, end), {part, name, *tensor});
    }
  }
}

}  // namespace deeptide::checkpoint
