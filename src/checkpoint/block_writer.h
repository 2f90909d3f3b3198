// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends bytes and a piece's elements to a file in large blocks at aligned offsets.
#pragma once

#include <cstdint>
#include <memory>

#include "checkpoint/file_io.h"
#include "checkpoint/piece.h"

namespace deeptide::checkpoint {

/// Bytes per write, and per staged copy of elements that cannot be read in place.
inline constexpr int64_t kBlockBytes = int64_t{8} << 20;

/// Every write but the last is a multiple of kBlockBytes at a multiple of kBlockBytes. Small pieces are joined in one
/// block of memory; whole blocks of large tensors go to the file without a copy.
class BlockWriter {
 public:
  explicit BlockWriter(File file);
  void append(const void* data, int64_t bytes);
  /// All `numel` elements of `data`, which must hold them.
  void append(const PieceData& data, int64_t numel);
  /// Writes what is left and fsyncs. Without it the file is incomplete.
  void finish();

 private:
  File file_;
  std::unique_ptr<char[]> block_;
  int64_t used_ = 0;
  int64_t offset_ = 0;  // of the block in the file
};

}  // namespace deeptide::checkpoint
