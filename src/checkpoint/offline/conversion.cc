// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Converts floating elements by the inline conversions of torch's headers.
#include "checkpoint/offline/conversion.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <cstring>

namespace deeptide::checkpoint {
namespace {

using c10::ScalarType;

// Elements of files begin at any byte, hence memcpy.
template <typename From, typename To>
void convert_all(const char* from, char* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    To converted;
    // fp64 to 16 bits goes through fp32, as in torch.
    if constexpr (sizeof(To) == 2) {
      converted = static_cast<To>(static_cast<float>(value));
    } else {
      converted = static_cast<To>(value);
    }
    std::memcpy(out + i * static_cast<int64_t>(sizeof(To)), &converted, sizeof(To));
  }
}

template <typename From>
void convert_from(const char* from, ScalarType to_type, char* out, int64_t count) {
  switch (to_type) {
    case ScalarType::Double:
      return convert_all<From, double>(from, out, count);
    case ScalarType::Half:
      return convert_all<From, c10::Half>(from, out, count);
    case ScalarType::BFloat16:
      return convert_all<From, c10::BFloat16>(from, out, count);
    default:
      return convert_all<From, float>(from, out, count);
  }
}

template <typename From>
void read_doubles(const char* from, int64_t count, std::vector<double>& out) {
  out.resize(static_cast<size_t>(count));
  convert_all<From, double>(from, reinterpret_cast<char*>(out.data()), count);
}

}  // namespace

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

void convert(ScalarType from_type, const char* from, ScalarType to_type, char* out, int64_t count) {
  switch (from_type) {
    case ScalarType::Double:
      return convert_from<double>(from, to_type, out, count);
    case ScalarType::Half:
      return convert_from<c10::Half>(from, to_type, out, count);
    case ScalarType::BFloat16:
      return convert_from<c10::BFloat16>(from, to_type, out, count);
    default:
      return convert_from<float>(from, to_type, out, count);
  }
}

void to_doubles(ScalarType type, const char* from, int64_t count, std::vector<double>& out) {
  switch (type) {
    case ScalarType::Double:
      return read_doubles<double>(from, count, out);
    case ScalarType::Float:
      return read_doubles<float>(from, count, out);
    case ScalarType::ComplexFloat:
      return read_doubles<float>(from, 2 * count, out);
    case ScalarType::Half:
      return read_doubles<c10::Half>(from, count, out);
    case ScalarType::BFloat16:
      return read_doubles<c10::BFloat16>(from, count, out);
    case ScalarType::Float8_e4m3fn:
      return read_doubles<c10::Float8_e4m3fn>(from, count, out);
    case ScalarType::Float8_e5m2:
      return read_doubles<c10::Float8_e5m2>(from, count, out);
    case ScalarType::Long:
      return read_doubles<int64_t>(from, count, out);
    case ScalarType::Int:
      return read_doubles<int32_t>(from, count, out);
    case ScalarType::Short:
      return read_doubles<int16_t>(from, count, out);
    case ScalarType::Char:
      return read_doubles<int8_t>(from, count, out);
    case ScalarType::UInt16:
      return read_doubles<uint16_t>(from, count, out);
    case ScalarType::UInt32:
      return read_doubles<uint32_t>(from, count, out);
    case ScalarType::UInt64:
      return read_doubles<uint64_t>(from, count, out);
    default:
      return read_doubles<uint8_t>(from, count, out);  // bytes and truth values
  }
}

}  // namespace deeptide::checkpoint
