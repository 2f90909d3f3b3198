// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which ranges of which logical tensors lie where: a rank's table, the manifest's, and their JSON.
#include "checkpoint/piece_table.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/json_field.h"
#include "checkpoint/safetensors.h"

namespace deeptide::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr const char* kFormat = "deeptide-checkpoint";

std::string numbered(int rank, const char* suffix) {
  char text[64];
  std::snprintf(text, sizeof(text), "rank_%05d%s", rank, suffix);
  return text;
}

const ordered_json& list(const ordered_json& value, const char* field, const std::string& path) {
  if (!value.at(field).is_array()) malformed(path, std::string("'") + field + "' is not a list");
  return value.at(field);
}

ordered_json encode_tensors(const Table& table) {
  ordered_json tensors = ordered_json::array();
  for (const auto& [key, logical] : table) {
    ordered_json pieces = ordered_json::array();
    for (const Extent& extent : logical.extents) {
      pieces.push_back(
          {{"begin", extent.begin}, {"end", extent.end}, {"file", extent.file}, {"offset", extent.offset}});
    }
    tensors.push_back({{"name", logical.name},
                       {"role", logical.role},
                       {"shape", logical.shape},
                       {"dtype", dtype_name(logical.dtype)},
                       {"pieces", std::move(pieces)}});
  }
  return tensors;
}

Extent decode_extent(const ordered_json& value, const std::string& path) {
  Extent extent{integer_of(value.at("begin"), path), integer_of(value.at("end"), path),
                value.at("file").get<std::string>(), integer_of(value.at("offset"), path)};
  // A file is a plain name in the folder: a manifest must not lead elsewhere.
  if (extent.file.empty() || extent.file[0] == '.' ||
      extent.file.find_first_of(std::string("/\0", 2)) != std::string::npos) {
    malformed(path, "'" + extent.file + "' is not a file name");
  }
  if (extent.begin < 0 || extent.end <= extent.begin || extent.offset < 0)
    malformed(path, "a piece has no valid range");
  return extent;
}

Table decode_tensors(const ordered_json& tensors, const std::string& path) {
  Table table;
  for (const ordered_json& value : tensors) {
    Logical logical;
    logical.name = value.at("name").get<std::string>();
    logical.role = value.at("role").get<std::string>();
    for (const ordered_json& extent : list(value, "shape", path)) logical.shape.push_back(integer_of(extent, path));
    logical.dtype = dtype_of_name(value.at("dtype").get<std::string>(), path);
    for (const ordered_json& piece : list(value, "pieces", path)) {
      logical.extents.push_back(decode_extent(piece, path));
    }
    const std::string key = tensor_key(logical.name, logical.role);
    if (!table.emplace(key, std::move(logical)).second) malformed(path, "'" + key + "' is there twice");
  }
  check_extents(table, path);
  return table;
}

// Runs `decode` on the parsed text; the library's complaints become ours.
template <typename Decode>
auto parse(const std::string& text, const std::string& path, Decode decode) {
  try {
    const ordered_json value = ordered_json::parse(text);
    if (!value.is_object()) malformed(path, "it is not a JSON object");
    return decode(value);
  } catch (const ordered_json::exception& error) {
    malformed(path, error.what());
  }
}

}  // namespace

std::string tensor_key(const std::string& name, const std::string& role) { return name + "/" + role; }
std::string range_key(const std::string& key, int64_t begin) { return key + "@" + std::to_string(begin); }
std::string shard_name(int rank) { return numbered(rank, ".safetensors"); }
std::string rank_table_name(int rank) { return numbered(rank, ".json"); }

Logical& declare(Table& table, const Logical& logical) {
  const std::string key = tensor_key(logical.name, logical.role);
  const auto [found, added] =
      table.try_emplace(key, Logical{logical.name, logical.role, logical.shape, logical.dtype, {}});
  if (found->second.shape != logical.shape || found->second.dtype != logical.dtype) {
    throw CheckpointError("cannot save '" + key + "': its pieces disagree, got shape " +
                          ordered_json(logical.shape).dump() + " " + dtype_name(logical.dtype) + " after " +
                          ordered_json(found->second.shape).dump() + " " + dtype_name(found->second.dtype) +
                          "; every rank must describe the same logical tensor");
  }
  return found->second;
}

void check_extents(Table& table, const std::string& where) {
  for (auto& [key, logical] : table) {
    std::sort(logical.extents.begin(), logical.extents.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const Extent& extent : logical.extents) {
      if (extent.begin < end) {
        throw CheckpointError(where + ": element " + std::to_string(extent.begin) + " of '" + key +
                              "' is in two pieces; one rank alone must own it");
      }
      end = extent.end;
    }
    if (end > numel_of(logical.shape, where)) {
      throw CheckpointError(where + ": a piece of '" + key + "' ends at element " + std::to_string(end) +
                            ", beyond shape " + ordered_json(logical.shape).dump());
    }
  }
}

std::string encode(const RankTable& table) {
  const ordered_json value = {{"state", table.state_json}, {"tensors", encode_tensors(table.tensors)}};
  return dump_text(value);
}

std::string encode(const ManifestTable& table) {
  const ordered_json value = {{"format", kFormat},
                              {"version", kVersion},
                              {"world_size", table.manifest.world_size},
                              {"state", table.manifest.state_json},
                              {"client_state", table.manifest.client_state_json},
                              {"rank_states", table.rank_states},
                              {"tensors", encode_tensors(table.tensors)}};
  return dump_text(value, 1);
}

RankTable decode_rank_table(const std::string& text, const std::string& path) {
  return parse(text, path, [&](const ordered_json& value) {
    return RankTable{value.at("state").get<std::string>(), decode_tensors(list(value, "tensors", path), path)};
  });
}

ManifestTable decode_manifest(const std::string& text, const std::string& path) {
  return parse(text, path, [&](const ordered_json& value) {
    if (value.at("format") != kFormat) malformed(path, "it is not a Deeptide manifest");
    const int64_t version = integer_of(value.at("version"), path);
    if (version > kVersion) {
      throw CheckpointError(path + " has version " + std::to_string(version) + ", this Deeptide reads up to " +
                            std::to_string(kVersion) + "; load it with a newer Deeptide");
    }
    ManifestTable table;
    table.manifest.version = static_cast<int>(version);
    table.rank_states = list(value, "rank_states", path).get<std::vector<std::string>>();
    if (version < 1 || integer_of(value.at("world_size"), path) != static_cast<int64_t>(table.rank_states.size())) {
      malformed(path, "world_size or version contradicts the rest");
    }
    table.manifest.world_size = static_cast<int>(table.rank_states.size());
    table.manifest.state_json = value.at("state").get<std::string>();
    table.manifest.client_state_json = value.at("client_state").get<std::string>();
    table.tensors = decode_tensors(list(value, "tensors", path), path);
    return table;
  });
}

}  // namespace deeptide::checkpoint
