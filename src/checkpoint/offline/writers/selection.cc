// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Selects what an export writes: which tensors, in which types, in which files.
#include "checkpoint/offline/writers/selection.h"

#include <cctype>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>

#include "checkpoint/load/extent_reader.h"
#include "checkpoint/offline/conversion.h"
#include "checkpoint/offline/writers/parts.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

using c10::ScalarType;

std::optional<ScalarType> export_type(const std::string& dtype) {
  static const std::map<std::string, std::optional<ScalarType>> kTypes{
      {"", std::nullopt}, {"fp32", ScalarType::Float}, {"bf16", ScalarType::BFloat16}, {"fp16", ScalarType::Half}};
  const auto found = kTypes.find(dtype);
  if (found == kTypes.end()) {
    throw ConfigError("export dtype: got '" + dtype + "', expected fp32, bf16, fp16, or nothing to keep each as saved");
  }
  return found->second;
}

}  // namespace

int64_t bytes_of(const ExportFile& items) {
  int64_t bytes = 0;
  for (const ExportItem& item : items) bytes += item.bytes;
  return bytes;
}

std::vector<ExportItem> select(const CheckpointReader& reader, const std::string& dtype, bool exclude_frozen) {
  const auto wanted = export_type(dtype);
  std::map<std::string, const CheckpointTensor*> chosen;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    const Role& role = reader.parts().logical(tensor).id.role;
    const bool own_buffer = role.is_buffer() && role.coordinates().is_origin();
    const bool frozen = role == Role::param();  // trained ones have masters
    if (!(role.is_weight() || own_buffer) || (frozen && exclude_frozen)) continue;
    const auto [place, added] = chosen.try_emplace(tensor.name, &tensor);
    if (!added && role == Role::master()) place->second = &tensor;
  }
  std::vector<ExportItem> items;
  for (const auto& [name, tensor] : chosen) {
    const Logical& logical = reader.parts().logical(*tensor);
    const bool converts = wanted && logical.id.role.is_weight() && is_floating(logical.dtype);
    const ScalarType type = converts ? *wanted : logical.dtype;
    items.push_back({tensor, logical.dtype, type, tensor->numel * element_bytes(type)});
  }
  return items;
}

int64_t parse_shard_size(const std::string& text) {
  if (text.empty()) return 0;
  std::string unit;
  for (const char c : text) {
    if (c != ' ' && c != '.' && (c < '0' || c > '9')) unit += static_cast<char>(std::toupper(c));
  }
  if (unit.ends_with('B')) unit.pop_back();
  static const std::map<std::string, double> kUnits{{"", 1.0},      {"K", 1e3},     {"M", 1e6},
                                                    {"G", 1e9},     {"T", 1e12},    {"KI", 0x1p10},
                                                    {"MI", 0x1p20}, {"GI", 0x1p30}, {"TI", 0x1p40}};
  const auto found = kUnits.find(unit);
  char* end = nullptr;
  const double count = std::strtod(text.c_str(), &end);
  const double bytes = found == kUnits.end() ? 0.0 : count * found->second;
  std::string rest = end;  // the unit and blanks, no second number
  const bool has_number = rest.find_first_of("0123456789.") == std::string::npos && end != text.c_str();
  if (!has_number || !(bytes >= 1.0) || bytes > 0x1p62) {
    throw ConfigError("max_shard_size: got '" + text + "', expected bytes such as 5GB, 500MiB or 1000000");
  }
  return static_cast<int64_t>(bytes);
}

std::vector<ExportFile> split(const std::vector<ExportItem>& items, int64_t most) {
  std::vector<ExportFile> files(1);
  int64_t held = 0;
  for (const ExportItem& item : items) {
    if (most > 0 && !files.back().empty() && held + item.bytes > most) {
      files.emplace_back();
      held = 0;
    }
    files.back().push_back(item);
    held += item.bytes;
  }
  return files;
}

ConvertedItems::ConvertedItems(const CheckpointReader& reader, const ExportFile& items)
    : reader_(reader), items_(items), files_(reader.folder()) {
  for (const ExportItem& item : items) announce_whole(files_, reader.parts().logical(*item.tensor));
}

void ConvertedItems::for_each_block(size_t item, const std::function<void(const char*, int64_t)>& visit) {
  const ExportItem& wanted = items_[item];
  const int64_t width = element_bytes(wanted.dtype);
  std::unique_ptr<char[]> converted;
  checkpoint::for_each_block(reader_, *wanted.tensor, files_, [&](int64_t, int64_t count, const char* data) {
    if (wanted.saved == wanted.dtype) return visit(data, count * width);
    // The first block is the largest or as large as any but for what a piece's end cut off it.
    if (!converted) converted = std::make_unique_for_overwrite<char[]>(2 * kHashedBlockBytes);
    convert(wanted.saved, data, wanted.dtype, converted.get(), count);
    visit(converted.get(), count * width);
  });
}

}  // namespace deeptide::checkpoint
