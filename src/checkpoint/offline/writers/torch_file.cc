// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes exported tensors as torch.save writes a dict of tensors.
#include "checkpoint/offline/writers/torch_file.h"

#include "checkpoint/offline/writers/file_writer.h"
#include "checkpoint/offline/writers/pickle_writer.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kFolder = "archive/";

}  // namespace

TorchArchive::TorchArchive(const File& file, int64_t start, const std::string& pickle) : zip_(file, start) {
  zip_.add(std::string(kFolder) + "data.pkl", pickle);
  zip_.add(std::string(kFolder) + "byteorder", "little");
}

void TorchArchive::begin_tensor(int64_t bytes) {
  zip_.begin(std::string(kFolder) + "data/" + std::to_string(num_tensors_++), bytes);
}

int64_t TorchArchive::finish() {
  zip_.add(std::string(kFolder) + "version", "3\n");
  return zip_.finish();
}

void write_archive(const std::string& path, const std::string& pickle,
                   const std::function<void(TorchArchive&)>& append) {
  const File file = File::create(path);
  TorchArchive archive(file, 0, pickle);
  append(archive);
  archive.finish();
  file.sync();
}

void pickle_tensor(const ExportItem& item, const std::string& path, PickleWriter& pickle) {
  if (pickle.tensor(item.tensor->shape, item.dtype)) return;
  throw CheckpointError("cannot export '" + item.tensor->name + "' to " + path + ": torch has no storage for " +
                        item.tensor->dtype + "; export safetensors");
}

void pickle_tensors(const ExportFile& items, const std::string& path, PickleWriter& pickle) {
  pickle.begin_dict();
  for (const ExportItem& item : items) {
    pickle.text(item.tensor->name);
    pickle_tensor(item, path, pickle);
  }
  pickle.end_dict();
}

void append_tensors(const CheckpointReader& reader, const ExportFile& items, TorchArchive& archive, Meter& meter) {
  ConvertedItems converted(reader, items);
  for (size_t i = 0; i < items.size(); ++i) {
    archive.begin_tensor(items[i].bytes);
    converted.for_each_block(i, [&](const char* data, int64_t bytes) {
      archive.append(data, bytes);
      meter.add(bytes);
    });
  }
}

void write_torch_file(const CheckpointReader& reader, const ExportFile& items, const std::string& path, Meter& meter) {
  PickleWriter pickle;
  pickle_tensors(items, path, pickle);
  write_archive(path, pickle.finish(), [&](TorchArchive& archive) { append_tensors(reader, items, archive, meter); });
}

}  // namespace deeptide::checkpoint
