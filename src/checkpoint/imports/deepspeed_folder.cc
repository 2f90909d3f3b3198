// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sorts a folder's files by the ranks in their names, as DeepSpeed 0.6 to 0.19 writes them.
#include "checkpoint/imports/deepspeed_folder.h"

#include <algorithm>
#include <cstdlib>
#include <map>

#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kModelEnd = "model_states.pt";  // of pipeline stages after a '-'
constexpr const char* kOptimizerEnd = "_optim_states.pt";
constexpr const char* kDataRank = "zero_pp_rank_";
constexpr const char* kModelRank = "mp_rank_";  // a stage of the pipeline, and a slice of its tensors
constexpr const char* kLayer = "layer_";
constexpr const char* kSlice = "-model_";

bool ends_as(const std::string& name, const char* end) { return name.ends_with(end); }

/// The number after `mark`; -1: none.
int64_t number_after(const std::string& name, const std::string& mark) {
  const size_t at = name.find(mark);
  if (at == std::string::npos || at + mark.size() >= name.size()) return -1;
  const char* digits = name.c_str() + at + mark.size();
  char* end = nullptr;
  const int64_t number = std::strtol(digits, &end, 10);
  return end == digits || number < 0 ? -1 : number;
}

[[noreturn]] void refuse_file(const std::string& path, const std::string& name, const char* what) {
  throw CheckpointError("cannot read DeepSpeed's checkpoint " + path + ": " + name + " is of a run with " + what +
                        ", which are not read yet; convert it with DeepSpeed's ds_to_universal or zero_to_fp32 first");
}

void check_kind(const std::string& path, const std::string& name) {
  if (name.find("_expert_") != std::string::npos || name.starts_with("expp_rank_")) {
    refuse_file(path, name, "experts on ranks of their own");
  }
}

using FilesByRank = std::map<int64_t, std::string>;

/// The names in the order of ranks, which must be 0, 1, ….
std::vector<std::string> in_order(const std::string& path, const FilesByRank& files, const char* kind) {
  std::vector<std::string> names;
  for (const auto& [rank, name] : files) {
    if (rank != static_cast<int64_t>(names.size())) {
      throw CheckpointError("DeepSpeed's checkpoint " + path + " lacks the file of " + kind + "-parallel rank " +
                            std::to_string(names.size()) + ", it has " + name + "; copy all ranks' files into it");
    }
    names.push_back(name);
  }
  return names;
}

struct PartByRank {
  FilesByRank models, optimizers;
};

void add_file(const std::string& path, const std::string& name, bool universal, PartByRank& part) {
  const bool model = ends_as(name, kModelEnd);
  const int64_t rank = std::max<int64_t>(number_after(name, kDataRank), 0);
  const auto [known, fresh] = (model ? part.models : part.optimizers).emplace(rank, name);
  if (fresh) return;
  if (!universal || !model) {
    throw CheckpointError("DeepSpeed's checkpoint " + path + " has two files of data-parallel rank " +
                          std::to_string(rank) + ", " + name + " is one; two saves are mixed, use another one");
  }
  known->second = std::min(known->second, name);  // the same one, under the names of two stages
}

}  // namespace

DeepspeedFolder list_deepspeed_folder(const std::string& path) {
  DeepspeedFolder folder{path, {}, {}, is_folder(path + "/zero")};
  std::map<int64_t, PartByRank> parts;
  std::map<int64_t, FilesByRank> layers;
  for (const std::string& name : list_folder(path)) {
    if (!ends_as(name, kModelEnd) && !ends_as(name, kOptimizerEnd)) continue;
    check_kind(path, name);
    if (name.starts_with(kLayer)) {
      layers[number_after(name, kLayer)][std::max<int64_t>(number_after(name, kSlice), 0)] = name;
    } else {
      add_file(path, name, folder.universal, parts[std::max<int64_t>(number_after(name, kModelRank), 0)]);
    }
  }
  for (const auto& [number, files] : layers) folder.layers[number] = in_order(path, files, "tensor");
  FilesByRank firsts;
  for (const auto& [rank, part] : parts) {
    DeepspeedPart listed{in_order(path, part.models, "data"), in_order(path, part.optimizers, "data")};
    if (listed.models.empty()) break;
    firsts[rank] = listed.models.front();
    folder.parts.push_back(std::move(listed));
  }
  if (folder.parts.empty() || folder.parts.size() != parts.size()) {
    throw CheckpointError("DeepSpeed's checkpoint " + path + " has no *mp_rank_" +
                          (folder.parts.size() < 10 ? "0" : "") + std::to_string(folder.parts.size()) +
                          "_model_states.pt; copy all its files into it");
  }
  in_order(path, firsts, "model");
  return folder;
}

}  // namespace deeptide::checkpoint
