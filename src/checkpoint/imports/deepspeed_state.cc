// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Translates DeepSpeed's counters and groups into the words of our manifest (engine/progress.cc reads them).
#include "checkpoint/imports/deepspeed_state.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>

#include "base/libraries/nlohmann.h"
#include "base/log.h"
#include "checkpoint/format/json_field.h"
#include "checkpoint/imports/deepspeed_tensors.h"
#include "checkpoint/imports/plain_state.h"

namespace deeptide::checkpoint {

using nlohmann::json;
using Kind = PickleValue::Kind;

namespace {

/// Keys that DeepSpeed itself saves beside the program's client state.
const std::set<std::string> kOwnKeys = {"module",
                                        "buffer_names",
                                        "optimizer",
                                        "param_shapes",
                                        "frozen_param_shapes",
                                        "shared_params",
                                        "lr_scheduler",
                                        "data_sampler",
                                        "random_ltd",
                                        "skipped_steps",
                                        "frozen_param_fragments",
                                        "global_steps",
                                        "ds_config",
                                        "ds_version",
                                        "dp_world_size",
                                        "mp_world_size",
                                        "global_samples",
                                        "csr_tensor_module_names",
                                        "sparse_tensor_module_names",
                                        "checkpoint_parallel_dimensions",
                                        "universal_checkpoint_info",
                                        "ds_autoep_layers",
                                        "num_experts",
                                        "deepspeed_client_state"};  // the last is our own front's, which unpickles it

double number_or(const TorchFile& file, const PickleValue* mapping, const char* key, double fallback) {
  const PickleValue* found = mapping == nullptr ? nullptr : mapping->find(key);
  const auto number = found == nullptr ? std::nullopt : file.number(*found);
  return number.value_or(fallback);
}

int64_t count_or(const TorchFile& file, const PickleValue* mapping, const char* key, int64_t fallback) {
  return static_cast<int64_t>(number_or(file, mapping, key, static_cast<double>(fallback)));
}

/// The file that has the optimizer's scalars, with its part that has them; both null: no file has.
struct OptimizerState {
  std::shared_ptr<const TorchFile> file;
  const PickleValue* states = nullptr;
};

OptimizerState optimizer_state(const DeepspeedFolder& folder, const TorchFile& model) {
  if (folder.universal && exists(folder.file("zero/optimizer_state.pt"))) {
    const auto file = std::make_shared<const TorchFile>(folder.file("zero/optimizer_state.pt"));
    return {file, &file->root()};
  }
  if (!folder.parts.front().optimizers.empty()) {
    const auto file = std::make_shared<const TorchFile>(folder.file(folder.parts.front().optimizers.front()));
    return {file, &member(*file, file->root(), "optimizer_state_dict")};
  }
  const PickleValue* optimizer = model.root().find("optimizer");
  if (optimizer == nullptr || !optimizer->is_mapping()) return {};
  return {std::shared_ptr<const TorchFile>(&model, [](const TorchFile*) {}), optimizer};
}

/// Adds what a parameter group has of an optimizer's hyper-parameters, under our names.
void add_numbers(const TorchFile& file, const PickleValue& group, const OptimizerInfo& optimizer, json& numbers) {
  for (const HyperparameterInfo& info : optimizer.hyperparameters) {
    const PickleValue* value = group.find(info.group_key);
    if (value == nullptr) continue;
    if (info.element >= 0) {
      const auto element = static_cast<size_t>(info.element);
      if (element >= value->items.size()) continue;
      value = value->items[element];
    }
    const auto number = file.number(*value);
    if (number) numbers[info.name] = info.flag ? json(*number != 0.0) : json(*number);
  }
}

/// Keeps the engine's values of keys that a group lacks. The program's own optimizer has no name there, but its numbers
/// have the names that all optimizers give them.
json group_of(const TorchFile& file, const PickleValue& group, const OptimizerInfo* optimizer) {
  json numbers = json::object();
  if (optimizer != nullptr) {
    add_numbers(file, group, *optimizer, numbers);
  } else {
    for (const OptimizerInfo& known : optimizers()) add_numbers(file, group, known, numbers);
  }
  return numbers;
}

/// Null: the checkpoint is elastic, has states and no groups; DeepSpeed keeps the program's.
json groups_of(const OptimizerState& saved, const OptimizerInfo* optimizer) {
  json groups = json::array();
  const PickleValue* base = saved.states == nullptr ? nullptr : base_optimizer(*saved.states);
  const PickleValue* listed = base == nullptr ? nullptr : base->find("param_groups");
  if (listed == nullptr) {
    const bool elastic = saved.states != nullptr && saved.states->find("base_optimizer_state") != nullptr;
    return elastic ? json() : groups;
  }
  for (const PickleValue* group : listed->items) groups.push_back(group_of(*saved.file, *group, optimizer));
  return groups;
}

/// DeepSpeed keeps a scaler's numbers in an object with ZeRO, and one by one at stage 0.
json loss_scale_of(const OptimizerState& saved) {
  const PickleValue* scaler = saved.states == nullptr ? nullptr : saved.states->find("loss_scaler");
  const PickleValue* numbers = scaler != nullptr && scaler->state != nullptr ? scaler->state : saved.states;
  if (numbers == nullptr || numbers->find("cur_scale") == nullptr) return nullptr;
  const TorchFile& file = *saved.file;
  // A scale that has seen no step is the engine's own, as one must be that was fixed.
  const bool dynamic = number_or(file, saved.states, "dynamic_loss_scale", 0.0) != 0.0;
  return {{"scale", number_or(file, numbers, "cur_scale", 1.0)},
          {"steps", dynamic ? count_or(file, numbers, "cur_iter", 0) : 0},
          {"last_overflow", count_or(file, numbers, "last_overflow_iter", -1)},
          {"hysteresis", count_or(file, numbers, "cur_hysteresis", 1)}};
}

/// The count of most parameters, and of those that have another.
void add_steps(const std::map<std::string, int64_t>& steps, int64_t applied, json& state) {
  int64_t most = steps.empty() ? applied : 0;
  for (const auto& [name, count] : steps) most = std::max(most, count);
  state["optimizer_steps"] = most;
  for (const auto& [name, count] : steps) {
    if (count != most) state["parameter_steps"][name] = count;
  }
}

/// At stage 3 the universal form has no count by parameter: the states beside it have.
int64_t steps_in(const OptimizerState& saved) {
  const PickleValue* base = saved.states == nullptr ? nullptr : base_optimizer(*saved.states);
  const PickleValue* by_number = base == nullptr ? nullptr : base->find("state");
  int64_t most = -1;
  if (by_number == nullptr) return most;
  for (const auto& [key, states] : by_number->entries) {
    most = std::max(most, count_or(*saved.file, states, "step", -1));
  }
  return most;
}

std::string client_state(const DeepspeedFolder& folder, const TorchFile& model) {
  PlainState plain(model);
  for (const auto& [key, value] : model.root().entries) {
    if (key->is(Kind::text) && !kOwnKeys.contains(key->text)) plain.add(key->text, *value);
  }
  json own = {{"from", "DeepSpeed"}};
  for (const auto& [kind, paths] : plain.notes.items()) own[kind] = paths;
  PlainState schedule(model);
  const PickleValue* scheduler = model.root().find("lr_scheduler");
  if (scheduler != nullptr && scheduler->is_mapping() && schedule.add("scheduler", *scheduler)) {
    own["plain_scheduler"] = {{"values", schedule.values}, {"notes", schedule.notes}};
  }
  for (const std::string& line : plain.left_out) {
    log(LogLevel::warning, "load: DeepSpeed's client state in " + folder.path + " is not read in full: " + line);
  }
  json text = plain.values;
  text["__deeptide__"] = own;
  return dump_text(text);
}

}  // namespace

const OptimizerInfo* optimizer_of(const TorchFile& model) {
  const PickleValue* config = model.root().find("ds_config");
  const PickleValue* optimizer = config == nullptr ? nullptr : config->find("optimizer");
  const PickleValue* type = optimizer == nullptr ? nullptr : optimizer->find("type");
  return type == nullptr || !type->is(Kind::text) ? nullptr : find_optimizer(type->text);
}

namespace {

/// The group of each parameter, where the checkpoint lists the parameters of several.
json groups_by_name(const TorchFile& model) {
  json groups = json::object();
  const PickleValue* listed = model.root().find("param_shapes");
  if (listed == nullptr || listed->items.size() < 2) return groups;
  for (size_t group = 0; group < listed->items.size(); ++group) {
    for (const auto& [name, shape] : listed->items[group]->entries) groups[name->text] = group;
  }
  return groups;
}

}  // namespace

Manifest deepspeed_manifest(const DeepspeedFolder& folder, const TorchFile& model,
                            const std::map<std::string, int64_t>& steps, const OptimizerInfo* optimizer) {
  const PickleValue& root = model.root();
  const OptimizerState saved = optimizer_state(folder, model);
  const PickleValue* config = root.find("ds_config");
  json state = json::object();
  const int64_t global_steps = count_or(model, &root, "global_steps", 0);
  const int64_t skipped = count_or(model, &root, "skipped_steps", 0);
  state["global_steps"] = global_steps;
  state["skipped_steps"] = skipped;
  state["global_samples"] = count_or(model, &root, "global_samples", 0);
  state["micro_steps"] = global_steps * count_or(model, config, "gradient_accumulation_steps", 1);
  state["schedule_iteration"] =
      count_or(model, root.find("lr_scheduler"), "last_batch_iteration", global_steps - skipped - 1);
  const int64_t in_states = steps_in(saved);
  add_steps(steps, in_states >= 0 ? in_states : global_steps - skipped, state);
  state["groups"] = groups_of(saved, optimizer);
  if (json by_name = groups_by_name(model); !by_name.empty()) state["parameter_groups"] = std::move(by_name);
  if (optimizer != nullptr) state["optimizer"] = optimizer->name;
  if (optimizer == nullptr) state["optimizer_unnamed"] = true;  // the program's own
  if (const json scale = loss_scale_of(saved); !scale.is_null()) state["loss_scale"] = scale;
  if (config != nullptr) {
    PlainState plain(model);
    if (plain.add("config", *config)) state["config"] = write_json(plain.values["config"]);
  }
  const auto world = static_cast<int>(std::clamp<int64_t>(count_or(model, &root, "dp_world_size", 1), 1, 1 << 20));
  return {kManifestVersion, world, dump_text(state), client_state(folder, model)};
}

}  // namespace deeptide::checkpoint
