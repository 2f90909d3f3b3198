// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exports weights, as files and their index, or with optimizer states in others' layouts.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/json_field.h"
#include "checkpoint/offline/writers/file_writer.h"
#include "deeptide/checkpoint.h"
#include "deeptide/hyperparameters.h"

namespace deeptide {

using checkpoint::ExportFile;
using checkpoint::ExportItem;

namespace {

struct Naming {
  const char* stem;
  const char* end;
};

std::string file_name(const Naming& naming, size_t index, size_t count) {
  if (count == 1) return std::string(naming.stem) + naming.end;
  char number[64];
  std::snprintf(number, sizeof(number), "-%05zu-of-%05zu", index + 1, count);
  return std::string(naming.stem) + number + naming.end;
}

std::string encode_index(const std::vector<ExportFile>& files, const std::vector<std::string>& names, int64_t total) {
  nlohmann::json map = nlohmann::json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    for (const ExportItem& item : files[i]) map[item.tensor->name] = names[i];
  }
  return checkpoint::dump_text(nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}},
                               2) +
         "\n";
}

// Files of an export before this one would be read beside it, or instead.
void remove_former(const std::string& folder, const Naming& naming, const std::vector<std::string>& written) {
  for (const std::string& name : checkpoint::list_folder(folder)) {
    const bool single = name == std::string(naming.stem) + naming.end;
    const bool index = name == std::string(naming.stem) + naming.end + ".index.json";
    const bool part = name.starts_with(std::string(naming.stem) + "-") && name.ends_with(naming.end) &&
                      name.find("-of-") != std::string::npos;
    const bool is_written = std::find(written.begin(), written.end(), name) != written.end();
    if ((single || index || part) && !is_written) checkpoint::remove_quietly(folder + "/" + name);
  }
}

/// A path at which an export grows, and at which nothing stays. Its own: ranks may all export into one folder.
class Growing {
 public:
  explicit Growing(const std::string& path)
      : path_(path + "." + checkpoint::nonce_text(checkpoint::draw_nonce()) + ".tmp") {}
  Growing(const Growing&) = delete;
  ~Growing() { checkpoint::remove_quietly(path_); }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

std::vector<std::string> export_universal(const CheckpointReader& reader, const std::string& folder,
                                          const CheckpointProgress& progress) {
  const std::string tag = std::filesystem::path(reader.folder() + "/").parent_path().filename().string();
  const Growing growing(folder + "/" + tag);
  checkpoint::write_universal_folder(reader, growing.path(), progress);
  const std::string former = checkpoint::replace_folder(growing.path(), folder + "/" + tag);
  if (!former.empty()) checkpoint::remove_quietly(former);
  for (const char* latest : {"latest_universal", "latest"}) checkpoint::write_text(folder + "/" + latest, tag);
  checkpoint::sync_folder(folder);
  return {tag, "latest_universal"};
}

std::vector<std::string> export_dcp(const CheckpointReader& reader, const std::string& folder,
                                    const CheckpointProgress& progress) {
  const Growing growing(folder + "/export");
  checkpoint::make_folders(growing.path());
  const auto names = checkpoint::write_dcp_folder(reader, growing.path(), progress);
  // Between the moves there is no checkpoint, and at no time one with another's data.
  checkpoint::remove_quietly(folder + "/" + names.front());
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    checkpoint::move_path(growing.path() + "/" + *name, folder + "/" + *name);
  }
  checkpoint::sync_folder(folder);
  return names;
}

}  // namespace

std::string param_groups_json(const CheckpointReader& reader) {
  const auto state = read_json(reader.state_json());
  const OptimizerInfo* optimizer = find_optimizer(state.value("optimizer", ""));
  auto groups = nlohmann::json::array();
  const auto listed = state.find("groups");
  if (listed == state.end() || !listed->is_array()) return checkpoint::dump_text(groups);
  for (const auto& saved : *listed) {
    auto group = nlohmann::json::object();
    for (const HyperparameterInfo& number :
         optimizer ? optimizer->hyperparameters : std::vector<HyperparameterInfo>{}) {
      if (!saved.contains(number.name)) continue;
      auto& value = group[number.group_key];
      number.element < 0 ? void(value = saved[number.name]) : value.push_back(saved[number.name]);
    }
    groups.push_back(std::move(group));
  }
  return checkpoint::dump_text(groups);
}

std::vector<std::string> export_checkpoint(const CheckpointReader& reader, const std::string& folder,
                                           const ExportOptions& options, const CheckpointProgress& progress) {
  if (options.format == ExportFormat::universal || options.format == ExportFormat::dcp) {
    const bool is_dcp = options.format == ExportFormat::dcp;
    if (!options.dtype.empty() || options.exclude_frozen) {
      throw ConfigError(std::string("export: ") + (is_dcp ? "dcp" : "universal") +
                        " holds what was saved; give no dtype and no exclude_frozen");
    }
    return (is_dcp ? export_dcp : export_universal)(reader, folder, progress);
  }
  const bool safe = options.format == ExportFormat::safetensors;
  const Naming naming = safe ? Naming{"model", ".safetensors"} : Naming{"pytorch_model", ".bin"};
  const auto items = checkpoint::select(reader, options.dtype, options.exclude_frozen);
  const auto files = checkpoint::split(items, checkpoint::parse_shard_size(options.max_shard_size));
  const int64_t total = checkpoint::bytes_of(items);
  checkpoint::Meter meter(progress, total);
  checkpoint::make_folders(folder);
  std::vector<std::string> names;
  for (size_t i = 0; i < files.size(); ++i) {
    names.push_back(file_name(naming, i, files.size()));
    const std::string path = folder + "/" + names.back();
    const Growing growing(path);  // a former file stays whole until this one is
    (safe ? checkpoint::write_safetensors_file : checkpoint::write_torch_file)(reader, files[i], growing.path(), meter);
    checkpoint::move_path(growing.path(), path);
  }
  if (files.size() > 1) {
    const std::string index = std::string(naming.stem) + naming.end + ".index.json";
    checkpoint::write_text(folder + "/" + index, encode_index(files, names, total));
    names.push_back(index);
  }
  remove_former(folder, naming, names);
  checkpoint::sync_folder(folder);
  return names;
}

}  // namespace deeptide
