// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes exported tensors as a safetensors file, block by block.
#include <algorithm>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/offline/writers/file_writer.h"
#include "checkpoint/save/aligned_writer.h"

namespace deeptide::checkpoint {

void write_safetensors_file(const CheckpointReader& reader, const ExportFile& items, const std::string& path,
                            Meter& meter) {
  ExportFile order = items;  // wide types first: each tensor begins at a multiple of its own width
  std::stable_sort(order.begin(), order.end(), [](const ExportItem& a, const ExportItem& b) {
    return element_bytes(a.dtype) > element_bytes(b.dtype);
  });
  Entries entries;
  int64_t end = 0;
  for (const ExportItem& item : order) {
    entries[item.tensor->name] = {item.dtype, item.tensor->shape, end, end + item.bytes};
    end += item.bytes;
  }
  const std::string header = encode_header(entries, {{"format", "pt"}});  // Transformers refuses files without it
  AlignedWriter file(path, std::ssize(header) + end);
  file.append(header.data(), std::ssize(header));
  ConvertedItems converted(reader, order);
  for (size_t i = 0; i < order.size(); ++i) {
    converted.for_each_block(i, [&](const char* data, int64_t bytes) {
      file.append(data, bytes);
      meter.add(bytes);
    });
  }
  file.finish();
}

}  // namespace deeptide::checkpoint
