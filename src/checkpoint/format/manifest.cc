// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The manifest of a checkpoint and the tables that its ranks write for it, as JSON.
#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <set>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"

namespace deeptide::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "deeptide-checkpoint";
constexpr const char* kDataAxis = "data";  // ranks of version 1 lie on it
constexpr const char* kMomentRole = "moment";
constexpr const char* kBufferRole = "buffer";
constexpr const char* kHash = "hash";  // how hashes were made; its presence promises a checksum
constexpr const char* kChecksum = "checksum";
constexpr size_t kChecksumDigits = 32;

const ordered_json& list(const ordered_json& value, const char* field, const std::string& path) {
  if (!value.at(field).is_array()) malformed(path, std::string("'") + field + "' is not a list");
  return value.at(field);
}

std::vector<int64_t> integers(const ordered_json& value, const char* field, const std::string& path) {
  std::vector<int64_t> numbers;
  for (const ordered_json& number : list(value, field, path)) numbers.push_back(integer_of(number, path));
  return numbers;
}

// A value that the constructors of roles and coordinates refuse makes a malformed file.
template <typename Make>
auto made(const std::string& path, Make make) {
  try {
    return make();
  } catch (const CheckpointError& error) {
    malformed(path, error.what());
  }
}

ordered_json encode_coordinates(const Coordinates& coordinates) {
  ordered_json value = ordered_json::object();
  for (const auto& [axis, index] : coordinates.indices()) value[axis] = index;
  return value;
}

Coordinates decode_coordinates(const ordered_json& value, const std::string& path) {
  if (!value.is_object()) malformed(path, "'coordinates' is not an object");
  std::map<std::string, int64_t> indices;
  for (const auto& [axis, index] : value.items()) indices[axis] = integer_of(index, path);
  return made(path, [&] { return Coordinates(indices); });
}

ordered_json encode_hashes(const std::vector<ContentHash>& hashes) {
  ordered_json value = ordered_json::array();
  for (const ContentHash& hash : hashes) value.push_back(hash.text());
  return value;
}

ContentHash decode_hash(const ordered_json& value, const std::string& path) {
  const auto text = value.get<std::string>();
  const auto hash = ContentHash::from_text(text);
  if (!hash) malformed(path, "'" + text.substr(0, 40) + "' is no hash");
  return *hash;
}

bool has_hashes(const ordered_json& value) { return value.contains(kHash) && value[kHash] == kHashName; }

// The text that the checksum covers: all of it, with zeros in the checksum's place. Empty without a checksum.
std::string checksummed(std::string text) {
  const std::string mark = std::string("\"") + kChecksum + "\": \"";
  const size_t found = text.rfind(mark);
  if (found == std::string::npos || found + mark.size() + kChecksumDigits > text.size()) return "";
  std::fill_n(text.begin() + static_cast<std::ptrdiff_t>(found + mark.size()), kChecksumDigits, '0');
  return text;
}

std::string checksum_of(const std::string& text) {
  return ContentHash::of(text.data(), static_cast<int64_t>(text.size())).text();
}

void check_checksum(const std::string& text, const ordered_json& value, const std::string& path) {
  if (!value.contains(kHash) && !value.contains(kChecksum)) return;  // before there were any
  const std::string covered = checksummed(text);
  const std::string expected = covered.empty() ? "none" : checksum_of(covered);
  const auto given = value.contains(kChecksum) ? value[kChecksum].get<std::string>() : "none";
  if (covered.empty() || given != expected) {
    malformed(path, "its checksum is " + given.substr(0, 40) + ", its text has " + expected + "; it was changed");
  }
}

ordered_json encode_tensors(const Table& table) {
  ordered_json tensors = ordered_json::array();
  for (const auto& [id, logical] : table) {
    ordered_json value = {{"name", id.name}};
    value["role"] = id.role.is_moment() ? kMomentRole : id.role.is_buffer() ? kBufferRole : id.role.text();
    if (id.role.is_moment()) value[kMomentRole] = id.role.moment_name();
    if (id.role.is_buffer()) value["coordinates"] = encode_coordinates(id.role.coordinates());
    value["shape"] = logical.shape;
    value["dtype"] = dtype_name(logical.dtype);
    value["pieces"] = ordered_json::array();
    for (const Extent& extent : logical.extents) {
      value["pieces"].push_back({{"offsets", extent.region.offsets},
                                 {"sizes", extent.region.sizes},
                                 {"file", extent.file},
                                 {"offset", extent.offset}});
      if (!extent.hashes.empty()) value["pieces"].back()["hashes"] = encode_hashes(extent.hashes);
    }
    tensors.push_back(std::move(value));
  }
  return tensors;
}

Role decode_role(const ordered_json& value, const std::string& path) {
  const auto text = value.at("role").get<std::string>();
  if (text == kMomentRole) return made(path, [&] { return Role::moment(value.at(kMomentRole).get<std::string>()); });
  if (text == kBufferRole) return Role::buffer(decode_coordinates(value.at("coordinates"), path));
  if (text == Role::master().text()) return Role::master();
  if (text == Role::param().text()) return Role::param();
  malformed(path, "role '" + text.substr(0, 40) + "' is not known");
}

// Version 1: "master", "param", a moment's name, "buffer" on rank 0 and "buffer.<rank>" on others.
Role decode_role_v1(const ordered_json& value, const std::string& path) {
  const auto text = value.at("role").get<std::string>();
  const std::string numbered = std::string(kBufferRole) + ".";
  if (text == kBufferRole) return Role::buffer();
  if (text == Role::master().text()) return Role::master();
  if (text == Role::param().text()) return Role::param();
  if (!text.starts_with(numbered)) return made(path, [&] { return Role::moment(text); });
  const std::string rank = text.substr(numbered.size());
  if (rank.empty() || rank.size() > 9 || rank[0] == '0' || rank.find_first_not_of("0123456789") != std::string::npos) {
    malformed(path, "'" + text.substr(0, 40) + "' does not name a rank's buffers");
  }
  return Role::buffer(Coordinates({{kDataAxis, std::stol(rank)}}));
}

Region decode_region_v1(const ordered_json& value, const std::string& path) {
  const int64_t begin = integer_of(value.at("begin"), path);
  const int64_t end = integer_of(value.at("end"), path);
  if (begin < 0 || end <= begin) malformed(path, "a piece has no valid range");
  return Region::range(begin, end);
}

Region decode_region(const ordered_json& value, const std::string& path) {
  Region region{integers(value, "offsets", path), integers(value, "sizes", path)};
  bool valid = region.offsets.size() == region.sizes.size();
  for (int64_t offset : region.offsets) valid = valid && offset >= 0;
  for (int64_t size : region.sizes) valid = valid && size > 0;
  if (!valid) malformed(path, "a piece has no valid region");
  return region;
}

Extent decode_extent(const ordered_json& value, int version, const std::string& path) {
  Extent extent{version == 1 ? decode_region_v1(value, path) : decode_region(value, path),
                value.at("file").get<std::string>(), integer_of(value.at("offset"), path)};
  // A file is a plain name in the folder: a manifest must not lead elsewhere.
  if (extent.file.empty() || extent.file[0] == '.' ||
      extent.file.find_first_of(std::string("/\0", 2)) != std::string::npos) {
    malformed(path, "'" + extent.file + "' is not a file name");
  }
  if (extent.offset < 0) malformed(path, "a piece has a negative offset");
  if (value.contains("hashes")) {
    for (const ordered_json& hash : list(value, "hashes", path)) extent.hashes.push_back(decode_hash(hash, path));
  }
  return extent;
}

Table decode_tensors(const ordered_json& tensors, int version, const std::string& path) {
  Table table;
  for (const ordered_json& value : tensors) {
    Logical logical{
        {value.at("name").get<std::string>(), version == 1 ? decode_role_v1(value, path) : decode_role(value, path)},
        integers(value, "shape", path),
        dtype_of_name(value.at("dtype").get<std::string>(), path),
        {},
        {}};
    const TensorId id = logical.id;
    logical.key = version == 1 ? id.name + "/" + value.at("role").get<std::string>() : tensor_key(id);
    for (const ordered_json& piece : list(value, "pieces", path)) {
      logical.extents.push_back(decode_extent(piece, version, path));
    }
    if (!table.emplace(id, std::move(logical)).second) malformed(path, "'" + tensor_key(id) + "' is there twice");
  }
  check_extents(table, path);
  return table;
}

RankState decode_rank_state(const ordered_json& value, const std::string& path) {
  return {decode_coordinates(value.at("coordinates"), path), value.at("state").get<std::string>()};
}

std::vector<RankState> decode_rank_states(const ordered_json& values, int version, const std::string& path) {
  std::vector<RankState> states;
  std::set<Coordinates> seen;
  for (const ordered_json& value : values) {
    const auto rank = static_cast<int64_t>(states.size());
    states.push_back(version == 1 ? RankState{Coordinates({{kDataAxis, rank}}), value.get<std::string>()}
                                  : decode_rank_state(value, path));
    if (!seen.insert(states.back().coordinates).second) {
      malformed(path, "two ranks are at " + states.back().coordinates.text());
    }
  }
  return states;
}

std::map<std::string, ContentHash> decode_headers(const ordered_json& value, const std::string& path) {
  std::map<std::string, ContentHash> hashes;
  for (const auto& [file, hash] : value.at("header_hashes").items()) hashes[file] = decode_hash(hash, path);
  return hashes;
}

// Hashes that were made otherwise are dropped: such a save is read as one without.
void decode_header_hashes(const ordered_json& value, ManifestTable& table, const std::string& path) {
  if (!has_hashes(value)) {
    for (auto& [id, logical] : table.tensors) {
      for (Extent& extent : logical.extents) extent.hashes.clear();
    }
    return;
  }
  table.header_hashes = decode_headers(value, path);
}

// Runs `decode` on the parsed text; errors of the JSON library become CheckpointErrors.
template <typename Decode>
auto parse(const std::string& text, const std::string& path, Decode decode) {
  try {
    const ordered_json value = read_json<ordered_json>(text);
    if (!value.is_object()) malformed(path, "it is not a JSON object");
    return decode(value);
  } catch (const ordered_json::exception& error) {
    malformed(path, error.what());
  }
}

ordered_json encode_headers(const std::map<std::string, ContentHash>& hashes) {
  ordered_json value = ordered_json::object();
  for (const auto& [file, hash] : hashes) value[file] = hash.text();
  return value;
}

int version_of(const ManifestTable& table) {
  constexpr int kWithoutSharedFiles = 3;
  for (const auto& [file, hash] : table.header_hashes) {
    if (is_frozen_name(file)) return kManifestVersion;
  }
  return kWithoutSharedFiles;
}

ordered_json encode_rank_state(const RankState& state) {
  return {{"coordinates", encode_coordinates(state.coordinates)}, {"state", state.json}};
}

}  // namespace

std::string encode(const RankTable& table) {
  ordered_json value = {{"save", table.nonce}, {"rank_state", encode_rank_state(table.state)}};
  value["header_hashes"] = encode_headers(table.header_hashes);
  value["tensors"] = encode_tensors(table.tensors);
  return dump_text(value);
}

std::string encode(const ManifestTable& table) {
  ordered_json rank_states = ordered_json::array();
  for (const RankState& state : table.rank_states) rank_states.push_back(encode_rank_state(state));
  const ordered_json value = {{"format", kFormat},
                              {"version", version_of(table)},
                              {"save", table.nonce},
                              {"world_size", table.manifest.world_size},
                              {"state", table.manifest.state_json},
                              {"client_state", table.manifest.client_state_json},
                              {"rank_states", std::move(rank_states)},
                              {kHash, kHashName},
                              {"header_hashes", encode_headers(table.header_hashes)},
                              {"tensors", encode_tensors(table.tensors)},
                              {kChecksum, std::string(kChecksumDigits, '0')}};
  std::string text = dump_text(value, 1);
  const std::string checksum = checksum_of(text);
  text.replace(text.rfind(std::string(kChecksumDigits, '0')), kChecksumDigits, checksum);
  return text;
}

RankTable decode_rank_table(const std::string& text, const std::string& path) {
  return parse(text, path, [&](const ordered_json& value) {
    RankTable table{value.at("save").get<std::string>(), decode_rank_state(value.at("rank_state"), path),
                    decode_tensors(list(value, "tensors", path), kManifestVersion, path)};
    table.header_hashes = decode_headers(value, path);
    return table;
  });
}

ManifestTable decode_manifest(const std::string& text, const std::string& path) {
  return parse(text, path, [&](const ordered_json& value) {
    if (value.at("format") != kFormat) malformed(path, "it is not a Deeptide manifest");
    const int64_t version = integer_of(value.at("version"), path);
    if (version > kManifestVersion) {
      throw CheckpointError(path + " has version " + std::to_string(version) + ", this Deeptide reads up to " +
                            std::to_string(kManifestVersion) + "; load it with a newer Deeptide");
    }
    ManifestTable table;
    table.manifest.version = static_cast<int>(version);
    const ordered_json& states = list(value, "rank_states", path);
    if (version < 1 || integer_of(value.at("world_size"), path) != static_cast<int64_t>(states.size())) {
      malformed(path, "world_size or version contradicts the rest");
    }
    table.manifest.world_size = static_cast<int>(states.size());
    table.rank_states = decode_rank_states(states, table.manifest.version, path);
    if (version > 1) table.nonce = value.at("save").get<std::string>();
    table.manifest.state_json = value.at("state").get<std::string>();
    table.manifest.client_state_json = value.at("client_state").get<std::string>();
    table.tensors = decode_tensors(list(value, "tensors", path), table.manifest.version, path);
    decode_header_hashes(value, table, path);
    check_checksum(text, value, path);
    return table;
  });
}

}  // namespace deeptide::checkpoint
