// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends bytes and a piece's elements to a file, and hashes them block by block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/content_hash.h"
#include "checkpoint/save/aligned_writer.h"
#include "checkpoint/save/piece.h"

namespace deeptide::checkpoint {

/// Writes as AlignedWriter does.
class BlockWriter {
 public:
  /// The arguments are those of AlignedWriter.
  BlockWriter(const std::string& path, int64_t file_bytes, int64_t buffer_bytes)
      : writer_(path, file_bytes, buffer_bytes) {}

  void append(const void* data, int64_t bytes);
  /// All `numel` elements of `data`, which must hold them. The file's end must be a multiple of their width.
  void append(const PieceData& data, int64_t numel);
  /// The hashes of the bytes appended since the last call.
  std::vector<ContentHash> take_hashes() { return hasher_.finish(); }
  /// Writes what is left, waits for all writes and fsyncs. Without it the file is incomplete.
  void finish() { writer_.finish(); }
  int64_t written_bytes() const { return writer_.written_bytes(); }

 private:
  void fill(const char* data, int64_t bytes);

  AlignedWriter writer_;
  BlockHasher hasher_;
};

}  // namespace deeptide::checkpoint
