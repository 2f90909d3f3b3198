// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads headers, pickles and indices of weight files.
#include "checkpoint/imports/weights/weight_places.h"

#include <cstring>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/imports/foreign_table.h"

namespace deeptide::checkpoint {
namespace {

/// The names that save_pretrained gives, the first that is there: files, and the indices of several.
constexpr const char* kWeightNames[] = {"model.safetensors", "pytorch_model.bin"};
constexpr const char* kIndexNames[] = {"model.safetensors.index.json", "pytorch_model.bin.index.json"};
constexpr const char* kWrappers[] = {"state_dict", "model", "module"};  // around the weights of training scripts

struct Tensors {
  std::map<std::string, TorchTensor> by_name;
  std::set<std::string> further_names, no_tensors;
};

/// Safetensors begin with a length, whose bytes are "PK…" in no file that a disk could hold.
bool is_torch_file(const std::string& path) {
  const File file = File::open(path);
  char magic[4] = {};
  if (file.size() >= 4) file.read_at(magic, 4, 0);
  return std::memcmp(magic, "PK\3\4", 4) == 0 || path.ends_with(".bin") || path.ends_with(".pt") ||
         path.ends_with(".pth");
}

Tensors tensors_of_safetensors(const std::string& path) {
  Tensors tensors;
  const Header header = read_header(File::open(path));
  for (const auto& [name, entry] : header.entries) {
    TorchTensor tensor{entry.dtype, entry.shape, Shape(entry.shape.size()), header.data_offset + entry.begin};
    int64_t stride = 1;
    for (size_t d = entry.shape.size(); d-- > 0; stride *= entry.shape[d]) tensor.strides[d] = stride;
    tensors.by_name.emplace(name, std::move(tensor));
  }
  return tensors;
}

Tensors tensors_of_torch(const std::string& path) {
  const TorchFile file(path);
  const PickleValue* state = &file.root();
  for (const char* wrapper : kWrappers) {
    const auto* inner = file.root().find(wrapper);
    if (inner != nullptr && inner->is_mapping()) state = inner;
  }
  if (!state->is_mapping()) malformed(path, "it holds no tensors by name; expected what state_dict() returns");
  Tensors tensors;
  std::set<std::tuple<int64_t, Shape, Shape>> seen;
  for (const auto& [name, value] : state->entries) {
    if (!name->is(PickleValue::Kind::text)) continue;
    auto tensor = file.tensor(*value);
    if (!tensor) {
      tensors.no_tensors.insert(name->text);
      continue;
    }
    const bool shared = tensor->numel() > 0 && !seen.insert({tensor->offset, tensor->shape, tensor->strides}).second;
    if (shared) tensors.further_names.insert(name->text);
    tensors.by_name.insert_or_assign(name->text, *std::move(tensor));
  }
  return tensors;
}

Tensors tensors_of_file(const std::string& path) {
  return is_torch_file(path) ? tensors_of_torch(path) : tensors_of_safetensors(path);
}

/// The files of an index, by their tensors.
std::map<std::string, std::string> files_of_index(const std::string& path) {
  std::map<std::string, std::string> files;
  try {
    const auto index = read_json(read_text(path));
    for (const auto& [name, file] : index.at("weight_map").items()) {
      const auto text = file.get<std::string>();
      if (text.empty() || text.find('/') != std::string::npos) {
        malformed(path, "'" + text.substr(0, 80) + "' is no file of its folder");
      }
      files[name] = text;
    }
  } catch (const nlohmann::json::exception& error) {
    malformed(path, std::string("it cannot be read: ") + error.what());
  }
  return files;
}

WeightPlaces places_of_file(const std::string& folder, const std::string& name) {
  Tensors found = tensors_of_file(folder + "/" + name);
  WeightPlaces places{folder, {}, std::move(found.further_names), std::move(found.no_tensors)};
  for (auto& [key, tensor] : found.by_name) places.tensors[key] = {name, std::move(tensor)};
  return places;
}

WeightPlaces places_of_index(const std::string& folder, const std::string& index) {
  WeightPlaces places{.folder = folder};
  std::map<std::string, Tensors> opened;
  for (const auto& [name, file] : files_of_index(folder + "/" + index)) {
    auto known = opened.find(file);
    if (known == opened.end()) {
      if (!std::filesystem::exists(folder + "/" + file)) {
        malformed(folder + "/" + index, "it places '" + name + "' in " + file + ", which is not there");
      }
      known = opened.emplace(file, tensors_of_file(folder + "/" + file)).first;
    }
    const Tensors& held = known->second;
    const auto found = held.by_name.find(name);
    if (found == held.by_name.end()) {
      malformed(folder + "/" + index, "it places '" + name + "' in " + file + ", which does not have it");
    }
    places.tensors[name] = {file, found->second};
    if (held.further_names.contains(name)) places.further_names.insert(name);
  }
  return places;
}

}  // namespace

WeightPlaces find_weights(const std::string& path) {
  if (!is_folder(path)) {
    const std::filesystem::path file = path;
    return places_of_file(file.has_parent_path() ? file.parent_path().string() : ".", file.filename().string());
  }
  for (size_t i = 0; i < std::size(kWeightNames); ++i) {
    if (exists(path + "/" + kIndexNames[i])) return places_of_index(path, kIndexNames[i]);
    if (exists(path + "/" + kWeightNames[i])) return places_of_file(path, kWeightNames[i]);
  }
  throw CheckpointError("no weights in " + path + ": it has neither " + kWeightNames[0] + " nor " + kIndexNames[0] +
                        ", nor " + kWeightNames[1] + " nor " + kIndexNames[1] +
                        "; name the folder that save_pretrained wrote, or a file of safetensors or torch.save");
}

void fit_names(WeightPlaces& places, const std::set<std::string>& names) {
  std::map<std::string, std::string> best;  // former names by new ones
  const auto first_part = [](const std::string& name) { return name.substr(0, name.find('.') + 1); };
  std::set<std::string> added, removed;
  for (const std::string& name : names) {
    if (places.tensors.contains(name)) return;
    added.insert(first_part(name));
  }
  for (const auto& [name, place] : places.tensors) removed.insert(first_part(name));
  const auto consider = [&](const std::string& prefix, bool adds) {
    if (prefix.empty()) return;
    std::map<std::string, std::string> renamed;
    for (const auto& [name, place] : places.tensors) {
      const bool has = name.starts_with(prefix);
      const std::string other = adds ? prefix + name : has ? name.substr(prefix.size()) : "";
      if (names.contains(other)) renamed[other] = name;
    }
    if (renamed.size() > best.size()) best = std::move(renamed);
  };
  for (const std::string& prefix : added) consider(prefix, true);
  for (const std::string& prefix : removed) consider(prefix, false);
  if (2 * best.size() <= std::max(places.tensors.size(), names.size())) return;  // of another model
  for (const auto& [other, name] : best) {
    auto entry = places.tensors.extract(name);
    entry.key() = other;
    places.tensors.insert(std::move(entry));
    if (places.further_names.erase(name) > 0) places.further_names.insert(other);
  }
}

ManifestTable weights_table(const WeightPlaces& places) {
  ManifestTable contents;
  for (const auto& [name, place] : places.tensors) {
    add_foreign(contents.tensors, {name, Role::param()}, place.file, place.tensor);
  }
  // Progress reads of this manifest that nothing has been done.
  contents.manifest.state_json =
      R"({"global_steps": 0, "skipped_steps": 0, "micro_steps": 0, "optimizer_steps": 0, "schedule_iteration": -1,)"
      R"( "groups": [], "weights_only": true})";
  return contents;
}

}  // namespace deeptide::checkpoint
