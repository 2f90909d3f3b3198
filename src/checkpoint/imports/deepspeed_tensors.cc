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

std::set<std::string> names_in(const PickleValue* mapping) {
  std::set<std::string> names;
  if (mapping == nullptr) return names;
  for (const auto& [key, value] : mapping->entries) names.insert(key->text);
  return names;
}

struct NumberedState {
  const TorchFile* file = nullptr;
  std::string file_name;  // in the folder
  TorchTensor master;
  bool has_master = false;
  const PickleValue* states = nullptr;
  Shape shape;
};

/// Matches the shapes of a group's states with those of the module's parameters, in order: from the front, and from
/// the back. Both agree when there is one way only.
std::vector<size_t> match(const std::string& path, const std::vector<NumberedState>& group,
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
    throw CheckpointError("DeepSpeed's checkpoint " + path +
                          " does not say which parameter each of its optimizer's states is of (stage 0 saves numbers "
                          "only, and shapes fit several); save it from a run with ZeRO stage 1");
  }
  return front;
}

void add_states(const DeepspeedModel& model, int64_t slice, const NumberedState& numbered,
                const ModuleTensor& parameter, ForeignTable& table) {
  const ForeignElements own{*parameter.file, parameter.file_name, parameter.tensor};
  const ForeignElements master{*numbered.file, numbered.file_name, numbered.master};
  model.slices().add_whole(slice, {parameter.name, Role::master()}, numbered.has_master ? master : own, table);
  for (const auto& [key, value] : numbered.states->entries) {
    if (!key->is(Kind::text)) continue;
    const auto tensor = numbered.file->tensor(*value);
    if (tensor && tensor->shape.empty()) {
      table.add_value(parameter.name, key->text, numbered.file_name, *tensor);
    }
    if (key->text == "step") {
      if (const auto steps = numbered.file->number(*value)) table.count_steps(parameter.name, *steps);
    } else if (tensor && tensor->shape == parameter.tensor.shape) {
      const auto role = table.role_of(key->text);
      const ForeignElements elements{*numbered.file, numbered.file_name, *tensor};
      if (role) model.slices().add_whole(slice, {parameter.name, *role}, elements, table);
    }
  }
}

/// Appends the states of one part to those of its groups; false if there are none yet, as before the first step.
bool append_states(const TorchFile& model, const std::string& file_name,
                   std::vector<std::vector<NumberedState>>& groups) {
  const PickleValue* optimizer = model.root().find("optimizer");
  const PickleValue* base = optimizer == nullptr ? nullptr : base_optimizer(*optimizer);
  if (base == nullptr) return false;
  const PickleValue* masters = optimizer->find("fp32_groups");
  const PickleValue* by_number = base->find("state");
  std::map<int64_t, const PickleValue*> states;
  if (by_number != nullptr) {
    for (const auto& [key, value] : by_number->entries) states[key->integer] = value;
  }
  size_t number_of_group = 0;
  for (const PickleValue* group : member(model, *base, "param_groups").items) {
    if (groups.size() <= number_of_group) groups.emplace_back();
    size_t in_group = 0;
    for (const PickleValue* number : member(model, *group, "params").items) {
      NumberedState state{&model, file_name, {}, false, nullptr, {}};
      const auto found = states.find(integer_in(model, *number));
      if (found == states.end()) return false;
      state.states = found->second;
      if (masters != nullptr && number_of_group < masters->items.size() &&
          in_group < masters->items[number_of_group]->items.size()) {
        const auto master = model.tensor(*masters->items[number_of_group]->items[in_group]);
        state.has_master = master.has_value();
        if (master) state.master = *master;
      }
      for (const auto& [key, value] : state.states->entries) {
        const auto tensor = model.tensor(*value);
        if (tensor && tensor->shape.size() >= state.shape.size()) state.shape = tensor->shape;
      }
      if (state.has_master) state.shape = state.master.shape;
      groups[number_of_group].push_back(std::move(state));
      ++in_group;
    }
    ++number_of_group;
  }
  return true;
}

/// The tensor of a universal file, which may say more of it.
std::optional<TorchTensor> universal_tensor(const TorchFile& file) {
  const PickleValue* value = file.root().find("param");
  return file.tensor(value == nullptr ? file.root() : *value);
}

/// `joined`: the tensors are made of several slices, each of which has `shape`.
void add_universal(const DeepspeedFolder& folder, const std::string& name, const Shape& shape, bool joined,
                   ForeignTable& table) {
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
    const Shape& whole = joined ? tensor->shape : shape;
    table.add({name, *role}, whole, Region::range(0, numel_of(whole, folder.path)),
              {file, place + "/" + file_name, *tensor});
  }
}

}  // namespace

const PickleValue& member(const TorchFile& file, const PickleValue& mapping, const char* key) {
  const PickleValue* found = mapping.find(key);
  if (found == nullptr) {
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

void read_unsharded_states(const DeepspeedModel& model, ForeignTable& table) {
  for (int64_t slice = 0; slice < model.num_slices(); ++slice) {
    std::vector<ModuleTensor> parameters = model.module(slice);
    std::erase_if(parameters, [](const ModuleTensor& tensor) { return tensor.buffer; });
    std::vector<std::vector<NumberedState>> groups;  // of all stages, one after the other, as the parameters are
    for (int64_t stage = 0; stage < model.num_stages(); ++stage) {
      if (!append_states(model.file(stage, slice), model.part(stage, slice).models.front(), groups)) return;
    }
    for (const auto& group : groups) {
      const std::vector<size_t> places = match(model.folder().path, group, parameters);
      for (size_t i = 0; i < places.size(); ++i) add_states(model, slice, group[i], parameters[places[i]], table);
    }
  }
}

void read_universal_states(const DeepspeedModel& model, ForeignTable& table) {
  const DeepspeedFolder& folder = model.folder();
  for (int64_t stage = 0; stage < model.num_stages(); ++stage) {
    const PickleValue* trained = model.file(stage, 0).root().find("param_shapes");
    if (trained == nullptr) continue;
    for (const auto& [name, shape] : model.shapes(stage, 0)) {
      if (table.has(name)) continue;  // tied to an earlier stage's
      if (!is_folder(folder.file("zero/" + name)) || name.find('/') != std::string::npos || name.starts_with(".")) {
        throw CheckpointError("DeepSpeed's universal checkpoint " + folder.path + " has nothing of '" + name + "'");
      }
      add_universal(folder, name, shape, model.num_slices() > 1, table);
    }
  }
}

namespace {

/// The slices that data-parallel ranks have of a part's frozen parameters, at stage 3.
void read_frozen(const DeepspeedModel& model, int64_t slice, const PickleValue& frozen, ForeignTable& table) {
  const auto& models = model.part(0, slice).models;
  const auto world = static_cast<int64_t>(models.size());
  for (int64_t rank = 0; rank < world; ++rank) {
    const std::string& name = models[static_cast<size_t>(rank)];
    const TorchFile part(model.folder().file(name));
    const PickleValue& fragments = member(part, part.root(), "frozen_param_fragments");
    for (const auto& [parameter, value] : frozen.entries) {
      const auto shape = shape_of(*value);
      const PickleValue* fragment = fragments.find(parameter->text);
      const auto tensor = fragment == nullptr ? std::nullopt : part.tensor(*fragment);
      if (!shape || !tensor) malformed(part.path(), "it has no slice of '" + parameter->text.substr(0, 80) + "'");
      const int64_t numel = numel_of(*shape, part.path()), share = (numel + world - 1) / world;
      const int64_t begin = std::min(rank * share, numel), end = std::min(begin + share, numel);
      const TensorId id{parameter->text, Role::param()};
      model.slices().add(slice, id, *shape, Region::range(begin, end), {part, name, *tensor}, table);
    }
  }
}

}  // namespace

void read_module(const DeepspeedModel& model, ForeignTable& table) {
  std::set<std::string> known;  // before: slices of one tensor follow one another
  for (int64_t slice = 0; slice < model.num_slices(); ++slice) {
    for (const ModuleTensor& tensor : model.module(slice)) {
      if (slice == 0 && table.has(tensor.name)) known.insert(tensor.name);
    }
  }
  for (int64_t slice = 0; slice < model.num_slices(); ++slice) {
    const std::string& file = model.part(0, slice).models.front();
    const PickleValue* frozen = model.file(0, slice).root().find("frozen_param_shapes");
    const std::set<std::string> elsewhere = names_in(frozen);
    const bool sliced = model.part(0, slice).models.size() > 1 || file.starts_with("zero_pp_rank_");
    for (const ModuleTensor& tensor : model.module(slice)) {
      // At stage 3 parameters are empty in the module.
      const bool is_empty = sliced && (!tensor.buffer || elsewhere.contains(tensor.name));
      if (known.contains(tensor.name) || is_empty) continue;
      const TensorId id{tensor.name, tensor.buffer ? Role::buffer() : Role::param()};
      model.slices().add_whole(slice, id, {*tensor.file, tensor.file_name, tensor.tensor}, table);
    }
    if (sliced && frozen != nullptr) read_frozen(model, slice, *frozen, table);
  }
}

}  // namespace deeptide::checkpoint
