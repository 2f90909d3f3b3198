// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes the layout of torch.distributed.checkpoint: a file of archives, and a pickle that tells where each begins.
#include <utility>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/offline/writers/file_writer.h"
#include "checkpoint/offline/writers/parts.h"
#include "checkpoint/offline/writers/states_by_name.h"

namespace deeptide::checkpoint {
namespace {

using c10::ScalarType;
using nlohmann::json;

constexpr const char* kData = "__0_0.distcp";  // of the only rank
constexpr const char* kMetadata = ".metadata";
constexpr const char* kClasses = "torch.distributed.checkpoint.metadata";
constexpr const char* kFiles = "torch.distributed.checkpoint.filesystem";

/// One value of the checkpoint, an archive of its own.
struct Entry {
  std::string name;
  std::vector<int64_t> shape;
  ScalarType dtype = ScalarType::Undefined;  // Undefined: no tensor
  int64_t begin = 0, end = 0;                // in the file
};

/// Masters, weights without one, moments, and the first rank's buffers.
ExportFile tensors_of(const CheckpointReader& reader) {
  ExportFile items = select(reader, /*dtype=*/"", /*exclude_frozen=*/false);
  for (const CheckpointTensor& tensor : reader.tensors()) {
    const Logical& logical = reader.parts().logical(tensor);
    if (!logical.id.role.is_moment() || logical.id.role.is_of_one_rank()) continue;
    items.push_back({&tensor, logical.dtype, logical.dtype, tensor.bytes});
  }
  return items;
}

class DcpFolder {
 public:
  DcpFolder(const CheckpointReader& reader, std::string folder, const CheckpointProgress& progress)
      : reader_(reader),
        folder_(std::move(folder)),
        items_(tensors_of(reader)),
        meter_(progress, bytes_of(items_)),
        data_(File::create(folder_ + "/" + kData)) {}

  void write() {
    write_tensors();
    write_optimizer();
    data_.sync();
    write_text(folder_ + "/" + kMetadata, metadata());
  }

 private:
  /// The name that torch's get_state_dict gives it.
  std::string name_of(const ExportItem& item) const {
    const Role& role = reader_.parts().logical(*item.tensor).id.role;
    if (!role.is_moment()) return "model." + item.tensor->name;
    return "optim.state." + item.tensor->name + "." + role.moment_name();
  }

  void append(Entry entry, const std::string& pickle, const std::function<void(TorchArchive&)>& append) {
    entry.begin = entries_.empty() ? 0 : entries_.back().end;
    TorchArchive archive(data_, entry.begin, pickle);
    append(archive);
    entry.end = archive.finish();
    entries_.push_back(std::move(entry));
  }

  void write_tensors() {
    ConvertedItems converted(reader_, items_);
    for (size_t i = 0; i < items_.size(); ++i) {
      PickleWriter pickle;
      pickle_tensor(items_[i], data_.path(), pickle);
      append({name_of(items_[i]), items_[i].tensor->shape, items_[i].dtype}, pickle.finish(),
             [&](TorchArchive& archive) {
               archive.begin_tensor(items_[i].bytes);
               converted.for_each_block(i, [&](const char* data, int64_t bytes) {
                 archive.append(data, bytes);
                 meter_.add(bytes);
               });
             });
    }
  }

  void write_steps(const std::string& name, float steps) {
    PickleWriter pickle;
    (void)pickle.tensor({}, ScalarType::Float);
    append({"optim.state." + name + ".step", {}, ScalarType::Float}, pickle.finish(), [&](TorchArchive& archive) {
      archive.begin_tensor(sizeof(steps));
      archive.append(&steps, sizeof(steps));
    });
  }

  /// The steps and the hyper-parameters of each trained parameter. Of hyper-parameters torch's get_state_dict has two
  /// forms: one value for each parameter and key (flatten_optimizer_state_dict), or one list of groups.
  void write_optimizer() {
    const json groups = read_json(param_groups_json(reader_));
    const StatesByName states(reader_, groups.size());
    json lists(groups.size(), json::array());  // of names, by group
    for (const ExportItem& item : items_) {
      if (reader_.parts().logical(*item.tensor).id.role != Role::master()) continue;
      const std::string& name = item.tensor->name;
      write_steps(name, states.steps_of(name));
      if (groups.empty()) continue;
      const size_t group = states.group_of(name);
      lists[group].push_back(name);
      for (const auto& [key, value] : groups[group].items()) {
        PickleWriter number;
        value.is_array() ? number.tuple(value) : number.json(value);
        append({"optim.param_groups." + name + "." + key, {}}, number.finish(), [](TorchArchive&) {});
      }
    }
    if (!groups.empty()) append({"optim.param_groups", {}}, pickle_groups(groups, lists), [](TorchArchive&) {});
  }

  static std::string pickle_groups(const json& groups, const json& lists) {
    PickleWriter pickle;
    pickle.begin_list();
    for (size_t group = 0; group < groups.size(); ++group) {
      pickle.begin_dict();
      for (const auto& [key, value] : groups[group].items()) {
        pickle.text(key);
        value.is_array() ? pickle.tuple(value) : pickle.json(value);
      }
      pickle.text("params");
      pickle.json(lists[group]);
      pickle.end_dict();
    }
    pickle.end_list();
    return pickle.finish();
  }

  static void pickle_properties(ScalarType dtype, PickleWriter& pickle) {
    pickle.instance(kClasses, "TensorProperties");
    pickle.begin_tuple();
    (void)pickle.dtype(dtype);
    pickle.global("torch.serialization", "_get_layout");
    pickle.tuple(json::array({"torch.strided"}));
    pickle.call();
    pickle.json(false);  // requires no gradient
    pickle.global(kClasses, "_MEM_FORMAT_ENCODING");
    pickle.tuple(json::array({0}));  // contiguous
    pickle.call();
    pickle.json(false);  // not pinned
    pickle.end_tuple();
    pickle.set_state();
  }

  static void pickle_description(const Entry& entry, PickleWriter& pickle) {
    if (entry.dtype == ScalarType::Undefined) return pickle.instance(kClasses, "BytesStorageMetadata");
    pickle.instance(kClasses, "TensorStorageMetadata");
    pickle.begin_dict();
    pickle.text("properties");
    pickle_properties(entry.dtype, pickle);
    pickle.text("size");
    pickle.size(entry.shape);
    pickle.text("chunks");
    pickle.begin_list();
    pickle.instance(kClasses, "ChunkStorageMetadata");
    pickle.begin_dict();
    pickle.text("offsets");
    pickle.size(std::vector<int64_t>(entry.shape.size(), 0));
    pickle.text("sizes");
    pickle.size(entry.shape);
    pickle.end_dict();
    pickle.set_state();
    pickle.end_list();
    pickle.end_dict();
    pickle.set_state();
  }

  /// A key and its value.
  static void pickle_place(const Entry& entry, PickleWriter& pickle) {
    pickle.instance(kClasses, "MetadataIndex");
    pickle.begin_dict();
    pickle.text("fqn");
    pickle.text(entry.name);
    if (entry.dtype != ScalarType::Undefined) {
      pickle.text("offset");
      pickle.size(std::vector<int64_t>(entry.shape.size(), 0));
      pickle.text("index");
      pickle.integer(0);
    }
    pickle.end_dict();
    pickle.set_state();
    pickle.instance(kFiles, "_StorageInfo");
    pickle.json({{"relative_path", kData}, {"offset", entry.begin}, {"length", entry.end - entry.begin}});
    pickle.set_state();
  }

  /// A Metadata, whose other fields have their defaults.
  std::string metadata() const {
    PickleWriter pickle;
    pickle.instance(kClasses, "Metadata");
    pickle.begin_dict();
    pickle.text("state_dict_metadata");
    pickle.begin_dict();
    for (const Entry& entry : entries_) {
      pickle.text(entry.name);
      pickle_description(entry, pickle);
    }
    pickle.end_dict();
    pickle.text("storage_data");
    pickle.begin_dict();
    for (const Entry& entry : entries_) pickle_place(entry, pickle);
    pickle.end_dict();
    pickle.end_dict();
    pickle.set_state();
    return pickle.finish();
  }

  const CheckpointReader& reader_;
  const std::string folder_;
  const ExportFile items_;
  Meter meter_;
  const File data_;
  std::vector<Entry> entries_;
};

}  // namespace

std::vector<std::string> write_dcp_folder(const CheckpointReader& reader, const std::string& folder,
                                          const CheckpointProgress& progress) {
  DcpFolder(reader, folder, progress).write();
  return {kMetadata, kData};
}

}  // namespace deeptide::checkpoint
