// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes the opcodes of values and of tensors whose elements lie elsewhere.
#include "checkpoint/offline/writers/pickle_writer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

namespace deeptide::checkpoint {
namespace {

using c10::ScalarType;

struct Names {
  const char* storage;
  const char* dtype;
};

std::optional<Names> names_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return Names{"DoubleStorage", "float64"};
    case ScalarType::Float:
      return Names{"FloatStorage", "float32"};
    case ScalarType::Half:
      return Names{"HalfStorage", "float16"};
    case ScalarType::BFloat16:
      return Names{"BFloat16Storage", "bfloat16"};
    case ScalarType::Long:
      return Names{"LongStorage", "int64"};
    case ScalarType::Int:
      return Names{"IntStorage", "int32"};
    case ScalarType::Short:
      return Names{"ShortStorage", "int16"};
    case ScalarType::Char:
      return Names{"CharStorage", "int8"};
    case ScalarType::Byte:
      return Names{"ByteStorage", "uint8"};
    case ScalarType::ComplexFloat:
      return Names{"ComplexFloatStorage", "complex64"};
    case ScalarType::Bool:
      return Names{"BoolStorage", "bool"};
    default:
      return std::nullopt;
  }
}

}  // namespace

void PickleWriter::text(const std::string& value) {
  text_ += 'X';
  little(value.size(), 4);
  text_ += value;
}

void PickleWriter::integer(int64_t value) {
  using Short = std::numeric_limits<int32_t>;
  const bool is_short = value >= Short::min() && value <= Short::max();
  text_ += is_short ? "J" : "\x8a\x08";
  little(static_cast<uint64_t>(value), is_short ? 4 : 8);
}

void PickleWriter::real(double value) {
  text_ += 'G';
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int i = 7; i >= 0; --i) text_ += static_cast<char>(bits >> (8 * i));
}

void PickleWriter::json(const nlohmann::json& value) {
  if (value.is_object()) {
    begin_dict();
    for (const auto& [key, item] : value.items()) {
      text(key);
      json(item);
    }
    return end_dict();
  }
  if (value.is_array()) {
    begin_list();
    for (const auto& item : value) json(item);
    return end_list();
  }
  if (value.is_string()) return text(value.get<std::string>());
  if (value.is_number_float()) return real(value.get<double>());
  if (value.is_number()) return integer(value.get<int64_t>());
  text_ += value.is_null() ? 'N' : value.get<bool>() ? '\x88' : '\x89';
}

void PickleWriter::tuple(const nlohmann::json& values) {
  begin_tuple();
  for (const auto& value : values) json(value);
  end_tuple();
}

void PickleWriter::size(const std::vector<int64_t>& shape) {
  global("torch", "Size");
  text_ += '(';
  integers(shape);
  text_ += "tR";
}

bool PickleWriter::tensor(const std::vector<int64_t>& shape, ScalarType dtype) {
  const auto names = names_of(dtype);
  if (!names) return false;
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  int64_t numel = 1;
  for (const int64_t extent : shape) numel *= extent;
  global("torch._utils", "_rebuild_tensor_v2");
  text_ += "((";
  text("storage");
  global("torch", names->storage);
  text(std::to_string(num_tensors_++));
  text("cpu");
  integer(numel);
  text_ += "tQ";  // a tuple that names the storage
  integer(0);     // its first element
  integers(shape);
  integers(strides);
  text_ += '\x89';  // requires no gradient
  global("collections", "OrderedDict");
  text_ += ")RtR";  // no hooks; the call
  return true;
}

bool PickleWriter::dtype(ScalarType dtype) {
  const auto names = names_of(dtype);
  if (names) global("torch", names->dtype);
  return names.has_value();
}

void PickleWriter::instance(const char* module, const char* name) {
  global(module, name);
  text_ += ")\x81";
}

void PickleWriter::global(const char* module, const char* name) {
  text_ += std::string("c") + module + "\n" + name + "\n";
}

void PickleWriter::integers(const std::vector<int64_t>& values) {
  text_ += '(';
  for (const int64_t value : values) integer(value);
  text_ += 't';
}

void PickleWriter::little(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) text_ += static_cast<char>(value >> (8 * i));
}

}  // namespace deeptide::checkpoint
