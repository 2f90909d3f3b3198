// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Selects what an export writes: which tensors, in which types, in which files.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/load/streamed_reads.h"
#include "deeptide/checkpoint.h"

namespace deeptide::checkpoint {

struct ExportItem {
  const CheckpointTensor* tensor;
  c10::ScalarType saved;
  c10::ScalarType dtype;
  int64_t bytes;  // in `dtype`
};
using ExportFile = std::vector<ExportItem>;
int64_t bytes_of(const ExportFile& items);

/// The weights and the first rank's buffers, in the order of names. A parameter's master weights come before the
/// weights that ranks computed with. Errors: ConfigError for an unknown dtype.
std::vector<ExportItem> select(const CheckpointReader& reader, const std::string& dtype, bool exclude_frozen);

/// Bytes of "5GB" (10^9 each), "500MiB" (2^20 each) or a number; 0 of an empty text. Errors: ConfigError.
int64_t parse_shard_size(const std::string& text);
/// Files of at most `most` bytes, in order; a larger tensor has a file of its own. 0: one file. At least one file.
std::vector<ExportFile> split(const std::vector<ExportItem>& items, int64_t most);

/// Reads items one after another, each block by block in its export type, while what comes next is fetched.
class ConvertedItems {
 public:
  ConvertedItems(const CheckpointReader& reader, const ExportFile& items);

  void for_each_block(size_t item, const std::function<void(const char* data, int64_t bytes)>& visit);

 private:
  const CheckpointReader& reader_;
  const ExportFile& items_;
  StreamedReads files_;
};

}  // namespace deeptide::checkpoint
