// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes exported tensors as torch.save writes a dict of tensors: a pickle of protocol 2 and one record per tensor.
#include <limits>

#include "checkpoint/format/file_io.h"
#include "checkpoint/offline/writers/file_writer.h"
#include "checkpoint/offline/writers/zip_file.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

using c10::ScalarType;

const char* storage_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "DoubleStorage";
    case ScalarType::Float:
      return "FloatStorage";
    case ScalarType::Half:
      return "HalfStorage";
    case ScalarType::BFloat16:
      return "BFloat16Storage";
    case ScalarType::Long:
      return "LongStorage";
    case ScalarType::Int:
      return "IntStorage";
    case ScalarType::Short:
      return "ShortStorage";
    case ScalarType::Char:
      return "CharStorage";
    case ScalarType::Byte:
      return "ByteStorage";
    case ScalarType::ComplexFloat:
      return "ComplexFloatStorage";
    case ScalarType::Bool:
      return "BoolStorage";
    default:
      return nullptr;
  }
}

/// The opcodes that a dict of tensors needs. Source: CPython's Lib/pickletools.py.
class Pickle {
 public:
  Pickle() : text_("\x80\x02}(", 4) {}  // protocol 2, an empty dict, a mark
  void tensor(const std::string& name, const std::vector<int64_t>& shape, const char* storage, int64_t numel,
              const std::string& record) {
    text(name);
    global("torch._utils", "_rebuild_tensor_v2");
    text_ += "((";
    text("storage");
    global("torch", storage);
    text(record);
    text("cpu");
    integer(numel);
    text_ += "tQ";  // a tuple that names the storage
    integer(0);     // its first element
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
    integers(shape);
    integers(strides);
    text_ += '\x89';  // requires no gradient
    global("collections", "OrderedDict");
    text_ += ")RtR";  // no hooks; the call
  }
  std::string finish() { return text_ + "u."; }

 private:
  void text(const std::string& value) {
    text_ += 'X';
    little(value.size(), 4);
    text_ += value;
  }
  void global(const char* module, const char* name) { text_ += std::string("c") + module + "\n" + name + "\n"; }
  void integer(int64_t value) {
    if (value <= std::numeric_limits<int32_t>::max()) {
      text_ += 'J';
      little(static_cast<uint64_t>(value), 4);
    } else {
      text_ += "\x8a\x08";
      little(static_cast<uint64_t>(value), 8);
    }
  }
  void integers(const std::vector<int64_t>& values) {
    text_ += '(';
    for (const int64_t value : values) integer(value);
    text_ += 't';
  }
  void little(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text_ += static_cast<char>(value >> (8 * i));
  }

  std::string text_;
};

}  // namespace

void write_torch_file(const CheckpointReader& reader, const ExportFile& items, const std::string& path, Meter& meter) {
  constexpr const char* kFolder = "archive/";
  Pickle pickle;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& [tensor, saved, dtype, bytes] = items[i];
    const char* storage = storage_name(dtype);
    if (storage == nullptr) {
      throw CheckpointError("cannot export '" + tensor->name + "' to " + path + ": torch has no storage for " +
                            tensor->dtype + "; export safetensors");
    }
    pickle.tensor(tensor->name, tensor->shape, storage, tensor->numel, std::to_string(i));
  }
  ZipFile zip(File::create(path));
  zip.add(std::string(kFolder) + "data.pkl", pickle.finish());
  zip.add(std::string(kFolder) + "byteorder", "little");
  ConvertedItems converted(reader, items);
  for (size_t i = 0; i < items.size(); ++i) {
    zip.begin(std::string(kFolder) + "data/" + std::to_string(i), items[i].bytes);
    converted.for_each_block(i, [&](const char* data, int64_t bytes) {
      zip.append(data, bytes);
      meter.add(bytes);
    });
  }
  zip.add(std::string(kFolder) + "version", "3\n");
  zip.finish();
}

}  // namespace deeptide::checkpoint
