// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes DeepSpeed's universal layout: a folder per trained parameter, and two files of what belongs to none.
#include <filesystem>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/offline/writers/file_writer.h"
#include "checkpoint/offline/writers/parts.h"
#include "checkpoint/offline/writers/states_by_name.h"

namespace deeptide::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kDeepspeed = "0.19.8";  // whose loader was read for this layout

const Role& role_of(const CheckpointReader& reader, const CheckpointTensor& tensor) {
  return reader.parts().logical(tensor).id.role;
}

/// Masters, in fp32, and moments.
ExportFile states_of(const CheckpointReader& reader) {
  ExportFile items;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    const Role& role = role_of(reader, tensor);
    const bool is_master = role == Role::master();
    if (!is_master && (!role.is_moment() || role.is_of_one_rank())) continue;
    const auto saved = reader.parts().logical(tensor).dtype;
    const auto dtype = is_master ? c10::ScalarType::Float : saved;
    items.push_back({&tensor, saved, dtype, tensor.numel * element_bytes(dtype)});
  }
  return items;
}

/// Frozen weights and the first rank's buffers.
ExportFile module_of(const CheckpointReader& reader) {
  ExportFile items = select(reader, /*dtype=*/"", /*exclude_frozen=*/false);
  std::erase_if(items, [&](const ExportItem& item) { return role_of(reader, *item.tensor) == Role::master(); });
  return items;
}

class UniversalFolder {
 public:
  UniversalFolder(const CheckpointReader& reader, std::string folder, const CheckpointProgress& progress)
      : reader_(reader),
        folder_(std::move(folder)),
        state_(read_json(reader.state_json())),
        states_(states_of(reader)),
        module_(module_of(reader)),
        by_name_(reader, 1),
        meter_(progress, bytes_of(states_) + bytes_of(module_)) {}

  void write() {
    make_folders(folder_ + "/zero");
    for (const ExportItem& item : states_) write_state(item);
    write_optimizer();
    write_module();
  }

 private:
  void write_state(const ExportItem& item) {
    const bool is_master = role_of(reader_, *item.tensor) == Role::master();
    const std::string folder = folder_ + "/zero/" + item.tensor->name;
    const std::string path = folder + "/" + (is_master ? "fp32" : item.tensor->role) + ".pt";
    make_folders(folder);
    PickleWriter pickle;
    pickle.begin_dict();
    pickle.text("param");
    pickle_tensor(item, path, pickle);
    pickle.text("cat_dim");
    pickle.integer(0);
    pickle.end_dict();
    write_archive(path, pickle.finish(),
                  [&](TorchArchive& archive) { append_tensors(reader_, {item}, archive, meter_); });
    if (!is_master) return;
    PickleWriter steps;
    pickle_steps(steps);
    write_with_steps(folder + "/step.pt", steps.finish(), by_name_.steps_of(item.tensor->name));
  }

  static void pickle_steps(PickleWriter& pickle) { (void)pickle.tensor({}, c10::ScalarType::Float); }

  /// A file whose only tensor is a number of steps.
  static void write_with_steps(const std::string& path, const std::string& pickle, float steps) {
    write_archive(path, pickle, [&](TorchArchive& archive) {
      archive.begin_tensor(sizeof(steps));
      archive.append(&steps, sizeof(steps));
    });
  }

  static void pickle_groups(const json& groups, PickleWriter& pickle) {
    pickle.text("param_groups");
    pickle.begin_list();
    for (const json& group : groups) {
      pickle.begin_dict();
      pickle.text("params");
      pickle.json(json::array());
      for (const auto& [key, value] : group.items()) {
        pickle.text(key);
        value.is_array() ? pickle.tuple(value) : pickle.json(value);
      }
      pickle.end_dict();
    }
    pickle.end_list();
  }

  void write_optimizer() const {
    const json groups = read_json(param_groups_json(reader_));
    PickleWriter pickle;
    pickle.begin_dict();
    pickle_fields({{"zero_stage", state_.value("zero_stage", 0)},
                   {"partition_count", std::vector<int>(groups.size(), reader_.world_size())},
                   {"overflow", false},
                   {"ds_version", kDeepspeed}},
                  pickle);
    pickle_groups(groups, pickle);
    pickle.text("optimizer_state_dict");
    pickle.begin_dict();
    pickle.text("state");
    pickle.begin_dict();
    pickle.integer(0);
    pickle.begin_dict();
    pickle.text("step");
    pickle_steps(pickle);
    pickle.end_dict();
    pickle.end_dict();
    pickle_groups(groups, pickle);
    pickle.end_dict();
    pickle.end_dict();
    const auto steps = static_cast<float>(state_.value("optimizer_steps", int64_t{0}));
    write_with_steps(folder_ + "/zero/optimizer_state.pt", pickle.finish(), steps);
  }

  static void pickle_fields(const json& fields, PickleWriter& pickle) {
    for (const auto& [key, value] : fields.items()) {
      pickle.text(key);
      pickle.json(value);
    }
  }

  /// The values that DeepSpeed reads beside the tensors: counters, schedule, the program's own state.
  json model_state() const {
    json fields = read_json(reader_.client_state_json());
    fields.erase("__deeptide__");
    fields.update({{"optimizer", nullptr},
                   {"lr_scheduler", {{"last_batch_iteration", state_.value("schedule_iteration", int64_t{-1})}}},
                   {"data_sampler", nullptr},
                   {"random_ltd", nullptr},
                   {"sparse_tensor_module_names", json::array()},
                   {"skipped_steps", state_.value("skipped_steps", int64_t{0})},
                   {"global_steps", state_.value("global_steps", int64_t{0})},
                   {"global_samples", state_.value("global_samples", int64_t{0})},
                   {"dp_world_size", reader_.world_size()},
                   {"mp_world_size", 1},
                   {"ds_config", json::object()},
                   {"ds_version", kDeepspeed}});
    json& buffers = fields["buffer_names"] = json::array();
    for (const ExportItem& item : module_) {
      if (role_of(reader_, *item.tensor).is_buffer()) buffers.push_back(item.tensor->name);
    }
    return fields;
  }

  void write_module() {
    const std::string path = folder_ + "/mp_rank_00_model_states.pt";  // its name at stages below 3
    PickleWriter pickle;
    pickle.begin_dict();
    pickle.text("module");
    pickle_tensors(module_, path, pickle);
    pickle_fields(model_state(), pickle);
    pickle.text("param_shapes");
    pickle.begin_list();
    pickle.begin_dict();
    for (const ExportItem& item : states_) {
      if (role_of(reader_, *item.tensor) != Role::master()) continue;
      pickle.text(item.tensor->name);
      pickle.size(item.tensor->shape);
    }
    pickle.end_dict();
    pickle.end_list();
    pickle.end_dict();
    write_archive(path, pickle.finish(),
                  [&](TorchArchive& archive) { append_tensors(reader_, module_, archive, meter_); });
    const std::string at_stage_3 = folder_ + "/zero_pp_rank_0_mp_rank_00_model_states.pt";
    std::error_code error;
    std::filesystem::copy_file(path, at_stage_3, error);
    if (error) fail("write", at_stage_3, error.value());
  }

  const CheckpointReader& reader_;
  const std::string folder_;
  const json state_;
  const ExportFile states_, module_;
  const StatesByName by_name_;
  Meter meter_;
};

}  // namespace

void write_universal_folder(const CheckpointReader& reader, const std::string& folder,
                            const CheckpointProgress& progress) {
  UniversalFolder(reader, folder, progress).write();
}

}  // namespace deeptide::checkpoint
