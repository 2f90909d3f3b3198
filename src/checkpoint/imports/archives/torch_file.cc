// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds tensors in what torch.save wrote: the names of functions that torch would call say what a value is.
#include "checkpoint/imports/archives/torch_file.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/format/json_field.h"

namespace deeptide::checkpoint {

using at::ScalarType;
using Kind = PickleValue::Kind;

namespace {

constexpr int64_t kMaxPickleBytes = int64_t{64} << 20;
constexpr int64_t kMaxNesting = 8;  // of parameters around tensors

constexpr struct {
  const char* storage;  // as in torch.FloatStorage
  const char* dtype;    // as in torch.float32
  ScalarType type;
} kTypes[] = {
    {"DoubleStorage", "float64", ScalarType::Double},
    {"FloatStorage", "float32", ScalarType::Float},
    {"HalfStorage", "float16", ScalarType::Half},
    {"BFloat16Storage", "bfloat16", ScalarType::BFloat16},
    {"LongStorage", "int64", ScalarType::Long},
    {"IntStorage", "int32", ScalarType::Int},
    {"ShortStorage", "int16", ScalarType::Short},
    {"CharStorage", "int8", ScalarType::Char},
    {"ByteStorage", "uint8", ScalarType::Byte},
    {"BoolStorage", "bool", ScalarType::Bool},
    {"ComplexFloatStorage", "complex64", ScalarType::ComplexFloat},
    {"", "uint16", ScalarType::UInt16},
    {"", "uint32", ScalarType::UInt32},
    {"", "uint64", ScalarType::UInt64},
    {"", "float8_e4m3fn", ScalarType::Float8_e4m3fn},
    {"", "float8_e5m2", ScalarType::Float8_e5m2},
};

std::optional<ScalarType> type_of_global(const PickleValue& value) {
  if (!value.is(Kind::global)) return std::nullopt;
  for (const auto& known : kTypes) {
    if (value.text == std::string("torch.") + known.dtype) return known.type;
    if (*known.storage != '\0' && value.text == std::string("torch.") + known.storage) return known.type;
  }
  return std::nullopt;
}

bool is_untyped(const PickleValue& value) {
  return value.text == "torch.storage.UntypedStorage" || value.text == "torch.storage._UntypedStorage";
}

std::string read_entry(const ZipArchive& archive, const std::string& name, int64_t most) {
  const ZipArchive::Span span = archive.find(name);
  if (span.bytes > most) malformed(archive.file().path(), "the entry '" + name + "' has more bytes than are read here");
  std::string text(static_cast<size_t>(span.bytes), '\0');
  archive.file().read_at(text.data(), span.bytes, span.offset);
  return text;
}

ZipArchive open_archive(const std::string& path) {
  char magic[2] = {};
  {
    const File file = File::open(path);
    if (file.size() >= 2) file.read_at(magic, 2, 0);
  }
  if (magic[0] == 'P' && magic[1] == 'K') return ZipArchive(path);
  malformed(path, "it is not of torch's zip format (1.6 and later); load it with torch and save it again");
}

std::string prefix_of(const ZipArchive& archive) {
  const std::string pickle = archive.name_with_end("/data.pkl");
  const std::string prefix = pickle.substr(0, pickle.size() - std::strlen("data.pkl"));
  if (archive.has(prefix + "byteorder") && read_entry(archive, prefix + "byteorder", 16) != "little") {
    malformed(archive.file().path(), "its numbers are big-endian");
  }
  return prefix;
}

int64_t integer_at(const PickleValue& arguments, size_t index, const std::string& path) {
  if (index >= arguments.items.size() || !arguments.items[index]->is(Kind::integer)) {
    malformed(path, "a tensor lacks a number");
  }
  return arguments.items[index]->integer;
}

}  // namespace

int64_t TorchTensor::numel() const {
  int64_t numel = 1;
  for (const int64_t extent : shape) numel *= extent;  // the constructor's checks keep it within int64
  return numel;
}

bool TorchTensor::is_contiguous() const {
  int64_t expected = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && strides[d] != expected) return numel() == 0;
    expected *= shape[d];
  }
  return true;
}

int64_t TorchTensor::span() const {
  if (numel() == 0) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * strides[d];
  return last + 1;
}

TorchFile::TorchFile(const std::string& path)
    : archive_(open_archive(path)),
      prefix_(prefix_of(archive_)),
      pickle_(read_entry(archive_, prefix_ + "data.pkl", kMaxPickleBytes), path) {}

std::optional<TorchTensor> TorchFile::tensor(const PickleValue& value) const {
  if (!value.is(Kind::object)) return std::nullopt;
  const std::string* function = &value.callee->text;
  const PickleValue* arguments = value.arguments;
  for (int64_t depth = 0; depth < kMaxNesting; ++depth) {
    const auto& items = arguments->items;
    if (*function == "torch._utils._rebuild_tensor_v2") return rebuilt(*arguments, false);
    if (*function == "torch._utils._rebuild_tensor_v3") return rebuilt(*arguments, true);
    if (*function == "torch._tensor._rebuild_from_type_v2" && items.size() > 2 && items[0]->is(Kind::global) &&
        items[2]->is(Kind::tuple)) {
      // (function, class, arguments, state): of a class of its own, or with attributes
      function = &items[0]->text;
      arguments = items[2];
    } else if (function->starts_with("torch._utils._rebuild_parameter") && !items.empty() &&
               items[0]->is(Kind::object)) {
      function = &items[0]->callee->text;
      arguments = items[0]->arguments;
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

/// (storage, offset, shape, strides, requires_grad, hooks[, dtype]); the storage is ("storage", class, key, device,
/// elements).
TorchTensor TorchFile::rebuilt(const PickleValue& arguments, bool typed) const {
  const auto& items = arguments.items;
  if (items.size() < (typed ? 7 : 4) || !items[0]->is(Kind::persistent)) malformed(path(), "a tensor has no storage");
  const PickleValue& id = *items[0]->items.front();
  if (!id.is(Kind::tuple) || id.items.size() != 5 || !id.items[0]->is(Kind::text) || id.items[0]->text != "storage" ||
      !id.items[1]->is(Kind::global) || !id.items[2]->is(Kind::text)) {
    malformed(path(), "a storage is not as torch.save describes one");
  }
  const PickleValue& named = typed && is_untyped(*id.items[1]) ? *items[6] : *id.items[1];
  const auto dtype = type_of_global(named);
  if (!dtype) malformed(path(), "a tensor of " + named.text.substr(0, 80) + " is not read here");
  const auto shape = shape_of(*items[2]), strides = shape_of(*items[3]);
  if (!shape || !strides || shape->size() != strides->size()) malformed(path(), "a tensor's shape is none");
  const ZipArchive::Span storage = archive_.find(prefix_ + "data/" + id.items[2]->text);
  const auto width = static_cast<int64_t>(c10::elementSize(*dtype));
  const int64_t first = integer_at(arguments, 1, path());
  int64_t last = first, numel = 1;
  bool possible = first >= 0;
  for (size_t d = 0; d < shape->size() && possible; ++d) {
    int64_t reach = 0;
    possible = (*shape)[d] >= 0 && (*strides)[d] >= 0 && !__builtin_mul_overflow(numel, (*shape)[d], &numel) &&
               !__builtin_mul_overflow(std::max<int64_t>((*shape)[d] - 1, 0), (*strides)[d], &reach) &&
               !__builtin_add_overflow(last, reach, &last);
  }
  // Strides of 0 repeat elements, so that a small storage may have a large tensor; but one that memory can address.
  int64_t bytes = 0;
  possible = possible && !__builtin_mul_overflow(numel, width, &bytes);
  const int64_t end = storage.bytes / width;
  if (!possible || (numel > 0 && last >= end) || (numel == 0 && first > end)) {
    malformed(path(), "a tensor leaves its storage '" + id.items[2]->text.substr(0, 80) + "'");
  }
  return {*dtype, *shape, *strides, storage.offset + first * width};
}

std::optional<double> TorchFile::number(const PickleValue& value) const {
  if (value.is(Kind::integer)) return static_cast<double>(value.integer);
  if (value.is(Kind::real)) return value.real;
  if (value.is(Kind::boolean)) return value.flag ? 1.0 : 0.0;
  if (!value.is(Kind::object)) return std::nullopt;
  if (const auto found = tensor(value)) {
    if (found->numel() != 1) return std::nullopt;
    if (found->dtype == ScalarType::Float) {
      float element = 0;
      file().read_at(&element, sizeof element, found->offset);
      return element;
    }
    if (found->dtype == ScalarType::Long) {
      int64_t element = 0;
      file().read_at(&element, sizeof element, found->offset);
      return static_cast<double>(element);
    }
    return std::nullopt;
  }
  // An enumeration's member, such as ZeroStageEnum.weights: its class and its number.
  const auto& items = value.arguments->items;
  if (items.size() == 1 && items.front()->is(Kind::integer)) return static_cast<double>(items.front()->integer);
  return std::nullopt;
}

std::optional<Shape> shape_of(const PickleValue& value) {
  const PickleValue* list = &value;
  if (value.is_made_by("torch.Size") && value.arguments->items.size() == 1) list = value.arguments->items.front();
  if (!list->is(Kind::tuple) && !list->is(Kind::list)) return std::nullopt;
  Shape shape;
  for (const PickleValue* extent : list->items) {
    if (!extent->is(Kind::integer)) return std::nullopt;
    shape.push_back(extent->integer);
  }
  return shape;
}

}  // namespace deeptide::checkpoint
