// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Walks values down to numbers and text; the walk is bounded, since values may hold themselves or each other often.
#include "checkpoint/imports/plain_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cmath>
#include <optional>
#include <utility>

#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"
#include "deeptide/weights.h"

namespace deeptide::checkpoint {

using nlohmann::json;
using Kind = PickleValue::Kind;

namespace {

constexpr size_t kMaxDepth = 60;
constexpr int64_t kMaxPlainValues = 1'000'000;
constexpr int64_t kMaxElements = 65'536;

/// Says why one value is not plain; the rest goes on.
struct NotPlain {
  std::string why;
};

/// numpy's "<f4" as a type; none: one that is not read here.
std::optional<at::ScalarType> type_of_numpy(const PickleValue& dtype) {
  static constexpr std::pair<const char*, at::ScalarType> kNames[] = {
      {"f8", at::kDouble}, {"f4", at::kFloat}, {"f2", at::kHalf}, {"i8", at::kLong}, {"i4", at::kInt},
      {"i2", at::kShort},  {"i1", at::kChar},  {"u1", at::kByte}, {"b1", at::kBool},
  };
  if (!dtype.is_made_by("numpy.dtype") || dtype.arguments->items.empty()) return std::nullopt;
  const PickleValue& name = *dtype.arguments->items.front();
  for (const auto& [known, type] : kNames) {
    if (name.is(Kind::text) && name.text == known) return type;
  }
  return std::nullopt;
}

/// The bytes of a value, which protocol 2 writes as text: _codecs.encode("…", "latin1").
std::optional<std::string> bytes_of(const PickleValue& value) {
  if (value.is(Kind::bytes)) return value.text;
  if (!value.is_made_by("_codecs.encode") || value.arguments->items.empty()) return std::nullopt;
  const PickleValue& text = *value.arguments->items.front();
  std::string bytes;
  for (size_t i = 0; i < text.text.size(); ++i) {
    const auto first = static_cast<uint8_t>(text.text[i]);
    if (first < 0x80) {
      bytes += static_cast<char>(first);
    } else if ((first & 0xfe) == 0xc2 && i + 1 < text.text.size()) {  // U+0080 to U+00FF
      bytes += static_cast<char>((first & 3) << 6 | (text.text[++i] & 0x3f));
    } else {
      return std::nullopt;
    }
  }
  return bytes;
}

bool is_utf8(const std::string& text) {
  try {
    write_json(json(text));
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

std::string hex_of(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<uint8_t>(byte) >> 4];
    text += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

json inert(const std::string& name) { return {{"__class__", name}}; }

}  // namespace

bool PlainState::add(const std::string& key, const PickleValue& value) {
  const json notes_before = notes;
  Path path{key};
  try {
    if (!is_utf8(key)) throw NotPlain{"its name is not UTF-8"};
    values[key] = convert(value, path);
    return true;
  } catch (const NotPlain& error) {
    left_out.push_back("'" + (is_utf8(key) ? key : "…") + "': " + error.why);
    notes = notes_before;
    return false;
  }
}

json PlainState::number(double real) const {
  if (std::isfinite(real)) return real;
  json made = inert("float");
  made["value"] = std::isnan(real) ? "nan" : real > 0 ? "inf" : "-inf";
  return made;
}

json PlainState::convert(const PickleValue& value, Path& path) {
  if (path.size() > kMaxDepth) throw NotPlain{"it holds itself, or is nested too deep"};
  if (++num_values_ > kMaxPlainValues) throw NotPlain{"it has too many values"};
  switch (value.kind) {
    case Kind::none:
      return nullptr;
    case Kind::boolean:
      return value.flag;
    case Kind::integer:
      return value.integer;
    case Kind::big: {
      json made = inert("int");
      made["value"] = value.text;
      return made;
    }
    case Kind::real:
      return number(value.real);
    case Kind::text:
      if (!is_utf8(value.text)) throw NotPlain{"it has text that is not UTF-8"};
      return value.text;
    case Kind::bytes: {
      json made = inert("bytes");
      made["hex"] = hex_of(value.text);
      return made;
    }
    case Kind::list:
      return items_of(value, path);
    case Kind::tuple: {
      json made = items_of(value, path);
      notes["tuples"].push_back(path);
      return made;
    }
    case Kind::set: {
      json made = inert("set");
      path.emplace_back("items");
      made["items"] = items_of(value, path);
      path.pop_back();
      return made;
    }
    case Kind::dict:
      return entries_of(value, path);
    case Kind::global:
      return inert(value.text);
    default:
      return object(value, path);
  }
}

json PlainState::items_of(const PickleValue& value, Path& path) {
  json made = json::array();
  for (size_t i = 0; i < value.items.size(); ++i) {
    path.emplace_back(i);
    made.push_back(convert(*value.items[i], path));
    path.pop_back();
  }
  return made;
}

json PlainState::entries_of(const PickleValue& value, Path& path) {
  json made = json::object();
  bool integers = false, texts = false;
  for (const auto& [key, entry] : value.entries) {
    integers = integers || key->is(Kind::integer);
    texts = texts || key->is(Kind::text);
    if (!key->is(Kind::integer) && !key->is(Kind::text)) throw NotPlain{"a key is neither text nor an integer"};
    const std::string name = key->is(Kind::text) ? key->text : std::to_string(key->integer);
    if (!is_utf8(name)) throw NotPlain{"a key is not UTF-8"};
    path.emplace_back(name);
    made[name] = convert(*entry, path);
    path.pop_back();
  }
  if (integers && texts) throw NotPlain{"a dict has text and integers as keys"};
  if (integers) notes["integer_keys"].push_back(path);
  return made;
}

json PlainState::object(const PickleValue& value, Path& path) {
  if (value.is(Kind::persistent)) throw NotPlain{"it has a storage outside a tensor"};
  if (const auto found = file_.tensor(value)) return tensor(*found, path);
  json made;
  if (numpy(value, path, made)) return made;
  if (value.is_mapping()) return entries_of(value, path);
  if (const auto bytes = bytes_of(value)) {
    made = inert("bytes");
    made["hex"] = hex_of(*bytes);
    return made;
  }
  if (!is_utf8(value.callee->text)) throw NotPlain{"a class's name is not UTF-8"};
  made = inert(value.callee->text);
  const auto put = [&](const char* name, const json& part, bool wanted) {
    if (wanted) made[name] = part;
  };
  const auto within = [&](const char* name, auto convert_part) {
    path.emplace_back(name);
    json part = convert_part();
    path.pop_back();
    return part;
  };
  put("arguments", within("arguments", [&] { return items_of(*value.arguments, path); }),
      !value.arguments->items.empty());
  put("items", within("items", [&] { return items_of(value, path); }), !value.items.empty());
  put("entries", within("entries", [&] { return entries_of(value, path); }), !value.entries.empty());
  if (value.state != nullptr) {
    put("state", within("state", [&] { return convert(*value.state, path); }), true);
  }
  return made;
}

json PlainState::elements(at::ScalarType dtype, const Shape& shape, const std::string& bytes, const char* kind,
                          const Path& path) {
  const int64_t numel = numel_of(shape, file_.path());
  json made = json::array();
  // Through double, or int64: exact for all that is converted here.
  const at::Tensor raw = at::empty(shape, at::TensorOptions().dtype(dtype));
  std::memcpy(raw.mutable_data_ptr(), bytes.data(), bytes.size());
  if (c10::isFloatingType(dtype)) {
    const at::Tensor wide = raw.to(at::kDouble);
    for (int64_t i = 0; i < numel; ++i) made.push_back(number(wide.const_data_ptr<double>()[i]));
  } else {
    const at::Tensor wide = raw.to(at::kLong);
    for (int64_t i = 0; i < numel; ++i) made.push_back(wide.const_data_ptr<int64_t>()[i]);
  }
  notes[kind].push_back({path, dtype_name(dtype), shape});
  return made;
}

json PlainState::tensor(const TorchTensor& tensor, const Path& path) {
  const auto width = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  num_values_ += tensor.numel();
  if (tensor.numel() > kMaxElements || !tensor.is_contiguous() || c10::isComplexType(tensor.dtype)) {
    throw NotPlain{"it has a tensor of " + std::to_string(tensor.numel()) +
                   " elements; small contiguous ones are read, others are torch.load's to read"};
  }
  std::string bytes(static_cast<size_t>(tensor.numel() * width), '\0');
  file_.file().read_at(bytes.data(), tensor.numel() * width, tensor.offset);
  return elements(tensor.dtype, tensor.shape, bytes, "tensors", path);
}

/// numpy's scalars: scalar(dtype, bytes). Its arrays: _reconstruct(…) with the state (1, shape, dtype, order, bytes).
bool PlainState::numpy(const PickleValue& value, const Path& path, json& made) {
  const bool scalar =
      value.is_made_by("numpy.core.multiarray.scalar") || value.is_made_by("numpy._core.multiarray.scalar");
  const bool array =
      value.is_made_by("numpy.core.multiarray._reconstruct") || value.is_made_by("numpy._core.multiarray._reconstruct");
  if (!scalar && !array) return false;
  const PickleValue* parts = scalar ? value.arguments : value.state;
  const size_t first = scalar ? 0 : 2;
  if (parts == nullptr || !parts->is(Kind::tuple) || parts->items.size() < (scalar ? 2 : 5)) {
    throw NotPlain{"numpy's values are not as numpy writes them"};
  }
  const auto dtype = type_of_numpy(*parts->items[first]);
  const auto shape = scalar ? std::optional<Shape>(Shape{}) : shape_of(*parts->items[1]);
  const auto bytes = bytes_of(*parts->items[scalar ? 1 : 4]);
  if (!dtype || !shape || !bytes) throw NotPlain{"numpy's values have a type that is not read here"};
  const bool columns = !scalar && parts->items[3]->is(Kind::boolean) && parts->items[3]->flag && shape->size() > 1;
  const int64_t numel = numel_of(*shape, file_.path());
  num_values_ += static_cast<int64_t>(bytes->size());
  if (columns || numel > kMaxElements ||
      numel * static_cast<int64_t>(c10::elementSize(*dtype)) != static_cast<int64_t>(bytes->size())) {
    throw NotPlain{"numpy's array is too large, or not in the order of C"};
  }
  const json all = elements(*dtype, *shape, *bytes, "arrays", path);
  made = all;
  if (scalar) {
    notes["arrays"].erase(notes["arrays"].size() - 1);
    if (notes["arrays"].empty()) notes.erase("arrays");
    made = *dtype == at::kBool ? json(all[0] != 0) : all[0];
  }
  return true;
}

}  // namespace deeptide::checkpoint

namespace deeptide {

std::string describe_torch_file(const std::string& path) {
  const checkpoint::TorchFile file(path);
  checkpoint::PlainState plain(file);
  plain.add("root", file.root());
  return checkpoint::dump_text(
      nlohmann::json{{"values", plain.values}, {"notes", plain.notes}, {"left_out", plain.left_out}});
}

}  // namespace deeptide
