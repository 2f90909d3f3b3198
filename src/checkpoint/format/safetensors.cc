// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: encodes it, and reads it without trusting it.
#include "checkpoint/format/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/json_field.h"

namespace deeptide::checkpoint {
namespace {

using at::ScalarType;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kAlignment = 64;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

constexpr struct Known {
  ScalarType dtype;
  const char* name;
  int64_t bytes;
} kDtypes[] = {
    {ScalarType::Double, "F64", 8},
    {ScalarType::Float, "F32", 4},
    {ScalarType::Half, "F16", 2},
    {ScalarType::BFloat16, "BF16", 2},
    {ScalarType::Long, "I64", 8},
    {ScalarType::Int, "I32", 4},
    {ScalarType::Short, "I16", 2},
    {ScalarType::Char, "I8", 1},
    {ScalarType::Byte, "U8", 1},
    {ScalarType::UInt16, "U16", 2},
    {ScalarType::UInt32, "U32", 4},
    {ScalarType::UInt64, "U64", 8},
    {ScalarType::Float8_e4m3fn, "F8_E4M3", 1},
    {ScalarType::Float8_e5m2, "F8_E5M2", 1},
    {ScalarType::ComplexFloat, "C64", 8},
    {ScalarType::Bool, "BOOL", 1},
};

const Known& known_of(ScalarType dtype) {
  for (const Known& known : kDtypes) {
    if (known.dtype == dtype) return known;
  }
  throw CheckpointError(std::string("cannot save a tensor of dtype ") + c10::toString(dtype) +
                        ": safetensors has no such dtype; convert it first");
}

Entry decode_entry(const json& value, const std::string& path) {
  Entry entry;
  entry.dtype = dtype_of_name(value.at("dtype").get<std::string>(), path);
  if (!value.at("shape").is_array()) malformed(path, "a shape is not a list");
  for (const json& extent : value.at("shape")) entry.shape.push_back(integer_of(extent, path));
  const json& offsets = value.at("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) malformed(path, "data_offsets is not a pair");
  entry.begin = integer_of(offsets[0], path);
  entry.end = integer_of(offsets[1], path);
  int64_t bytes;
  if (__builtin_mul_overflow(numel_of(entry.shape, path), element_bytes(entry.dtype), &bytes) || entry.begin < 0 ||
      entry.end < entry.begin || entry.end - entry.begin != bytes) {
    malformed(path, "data_offsets " + write_json(offsets) + " do not fit shape " + write_json(value.at("shape")));
  }
  return entry;
}

// The format requires that the tensors cover the data without overlap or gap.
void check_layout(const Header& header, int64_t data_bytes, const std::string& path) {
  std::vector<std::tuple<int64_t, int64_t, const std::string*>> spans;
  for (const auto& [key, entry] : header.entries) spans.emplace_back(entry.begin, entry.end, &key);
  std::sort(spans.begin(), spans.end());
  int64_t end = 0;
  const std::string* cut = nullptr;
  for (const auto& [begin, past, key] : spans) {
    if (begin < end)
      malformed(path, "two tensors overlap at data byte " + std::to_string(begin) + ", of '" + *key + "'");
    if (begin > end) malformed(path, "no tensor covers data byte " + std::to_string(end));
    end = past;
    if (cut == nullptr && end > data_bytes) cut = key;
  }
  if (end != data_bytes) {
    malformed(path, "it holds " + std::to_string(data_bytes) + " bytes of data, its header describes " +
                        std::to_string(end) + (cut == nullptr ? "" : ": it ends within '" + *cut + "'") +
                        " (was it truncated?)");
  }
}

}  // namespace

std::string dtype_name(ScalarType dtype) { return known_of(dtype).name; }

int64_t element_bytes(ScalarType dtype) { return known_of(dtype).bytes; }

ScalarType dtype_of_name(const std::string& name, const std::string& where) {
  for (const auto& known : kDtypes) {
    if (name == known.name) return known.dtype;
  }
  malformed(where, "dtype '" + name.substr(0, 40) + "' is not known");
}

int64_t numel_of(const std::vector<int64_t>& shape, const std::string& where) {
  int64_t numel = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(numel, extent, &numel)) malformed(where, "a shape is not possible");
  }
  return numel;
}

std::string encode_header(const Entries& entries, const std::map<std::string, std::string>& metadata) {
  json header = {{"__metadata__", metadata}};
  for (const auto& [key, entry] : entries) {
    header[key] = {
        {"dtype", dtype_name(entry.dtype)}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = dump_text(header);
  const int64_t used = kLengthBytes + static_cast<int64_t>(text.size());
  text.append((kAlignment - used % kAlignment) % kAlignment, ' ');
  const uint64_t length = text.size();
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    throw CheckpointError("cannot save " + std::to_string(entries.size()) + " tensors in one safetensors file: its " +
                          "header would take " + std::to_string(length) + " bytes, at most 100000000 are legal");
  }
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, kLengthBytes);
  return bytes + text;
}

Header read_header(const File& file) {
  const std::string& path = file.path();
  const int64_t file_bytes = file.size();
  if (file_bytes < kLengthBytes)
    malformed(path, "it has " + std::to_string(file_bytes) + " bytes, too few for a header");
  uint64_t length;
  file.read_at(&length, kLengthBytes, 0);
  if (length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - kLengthBytes))) {
    malformed(path,
              "its header claims " + std::to_string(length) + " bytes, the file has " + std::to_string(file_bytes));
  }
  std::string text(length, '\0');
  file.read_at(text.data(), static_cast<int64_t>(length), kLengthBytes);
  Header header;
  header.data_offset = kLengthBytes + static_cast<int64_t>(length);
  try {
    const json parsed = read_json(text);
    if (!parsed.is_object()) malformed(path, "its header is not a JSON object");
    for (const auto& [key, value] : parsed.items()) {
      if (key == "__metadata__") {
        header.metadata = value.get<std::map<std::string, std::string>>();
      } else {
        header.entries[key] = decode_entry(value, path + " at '" + key.substr(0, 200) + "'");
      }
    }
  } catch (const json::exception& error) {
    malformed(path, std::string("its header cannot be read: ") + error.what());
  }
  check_layout(header, file_bytes - header.data_offset, path);
  return header;
}

}  // namespace deeptide::checkpoint
