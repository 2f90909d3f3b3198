// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes DeepSpeed's universal layout: a folder per trained parameter, and two files of what belongs to none.
#include <cstring>
#include <filesystem>
#include <set>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/offline/writers/file_writer.h"
#include "checkpoint/offline/writers/parts.h"

namespace deeptide::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kDeepspeed = "0.19.8";  // whose loader was read for this layout

std::vector<ExportItem> items_of(const CheckpointReader& reader, bool of_module) {
  std::set<std::string> trained;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    if (reader.parts().logical(tensor).id.role == Role::master()) trained.insert(tensor.name);
  }
  std::vector<ExportItem> items;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    const Logical& logical = reader.parts().logical(tensor);
    const Role& role = logical.id.role;
    const bool is_frozen = role == Role::param() && !trained.contains(tensor.name);
    const bool in_module = is_frozen || role == Role::buffer();
    if (role.is_of_one_rank() && !in_module) continue;
    if (role == Role::param() && !is_frozen) continue;  // the copy that computed
    if (in_module != of_module) continue;
    const auto dtype = role == Role::master() ? c10::ScalarType::Float : logical.dtype;
    items.push_back({&tensor, logical.dtype, dtype, tensor.numel * element_bytes(dtype)});
  }
  return items;
}

class UniversalFolder {
 public:
  UniversalFolder(const CheckpointReader& reader, std::string folder, const CheckpointProgress& progress)
      : reader_(reader),
        folder_(std::move(folder)),
        state_(read_json(reader.state_json())),
        states_(items_of(reader, false)),
        module_(items_of(reader, true)),
        steps_(static_cast<float>(state_.value("optimizer_steps", int64_t{0}))),
        meter_(progress, bytes_of(states_) + bytes_of(module_)) {}

  void write() {
    make_folders(folder_ + "/zero");
    for (const ExportItem& item : states_) write_state(item);
    write_optimizer();
    write_module();
  }

 private:
  static int64_t bytes_of(const ExportFile& items) {
    int64_t bytes = 0;
    for (const ExportItem& item : items) bytes += item.bytes;
    return bytes;
  }

  void write_state(const ExportItem& item) {
    const bool is_master = reader_.parts().logical(*item.tensor).id.role == Role::master();
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
    TorchArchive archive(path, pickle.finish());
    append_tensors(reader_, {item}, archive, meter_);
    archive.finish();
    if (!is_master) return;
    PickleWriter steps;
    pickle_steps(steps);
    write_with_steps(folder + "/step.pt", steps.finish());
  }

  static void pickle_steps(PickleWriter& pickle) { (void)pickle.tensor({}, c10::ScalarType::Float); }

  /// A file whose only tensor is the number of steps.
  void write_with_steps(const std::string& path, const std::string& pickle) const {
    TorchArchive archive(path, pickle);
    archive.begin_tensor(sizeof(steps_));
    archive.append(&steps_, sizeof(steps_));
    archive.finish();
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
    write_with_steps(folder_ + "/zero/optimizer_state.pt", pickle.finish());
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
      if (reader_.parts().logical(*item.tensor).id.role.is_buffer()) buffers.push_back(item.tensor->name);
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
      if (reader_.parts().logical(*item.tensor).id.role != Role::master()) continue;
      pickle.text(item.tensor->name);
      pickle.size(item.tensor->shape);
    }
    pickle.end_dict();
    pickle.end_list();
    pickle.end_dict();
    TorchArchive archive(path, pickle.finish());
    append_tensors(reader_, module_, archive, meter_);
    archive.finish();
    const std::string at_stage_3 = folder_ + "/zero_pp_rank_0_mp_rank_00_model_states.pt";
    std::error_code error;
    std::filesystem::copy_file(path, at_stage_3, error);
    if (error) fail("write", at_stage_3, error.value());
  }

  const CheckpointReader& reader_;
  const std::string folder_;
  const json state_;
  const ExportFile states_, module_;
  const float steps_;
  Meter meter_;
};

}  // namespace

void write_universal_folder(const CheckpointReader& reader, const std::string& folder,
                            const CheckpointProgress& progress) {
  UniversalFolder(reader, folder, progress).write();
}

}  // namespace deeptide::checkpoint
