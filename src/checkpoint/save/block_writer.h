// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends bytes and a piece's elements to a file in large blocks at aligned offsets, several under way at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/content_hash.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/save/piece.h"
#include "io/queue.h"

namespace deeptide::checkpoint {

/// Bytes per write.
inline constexpr int64_t kBlockBytes = kHashedBlockBytes;
/// Memory that the blocks of a save take unless its user names another amount.
inline constexpr int64_t kBufferBytes = int64_t{64} << 20;

/// Gathers what is appended in aligned blocks of memory and writes each past the page cache (O_DIRECT, where the
/// filesystem has it) while the next one fills. Waits for the oldest write where no block is free.
class BlockWriter {
 public:
  /// `buffer_bytes`: of all blocks; there are at least two. They come to be as they are needed.
  explicit BlockWriter(const std::string& path, int64_t buffer_bytes = kBufferBytes);
  /// Waits for the writes under way.
  ~BlockWriter();
  BlockWriter(const BlockWriter&) = delete;

  void append(const void* data, int64_t bytes);
  /// All `numel` elements of `data`, which must hold them. The file's end must be a multiple of their width.
  void append(const PieceData& data, int64_t numel);
  /// The hashes of the bytes appended since the last call.
  std::vector<ContentHash> take_hashes() { return hasher_.finish(); }
  /// Writes what is left, waits for all writes and fsyncs. Without it the file is incomplete.
  void finish();
  int64_t written_bytes() const { return offset_ + used_; }

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  struct Block {
    std::unique_ptr<char, Free> memory;
    io::Queue::Ticket ticket = 0;  // 0: none under way
    int64_t offset = 0;            // in the file
    int64_t bytes = 0;             // of the transfer under way
  };

  char* room();
  void fill(int64_t bytes);
  void start(int64_t bytes);
  void settle(Block& block);

  File file_;
  std::unique_ptr<io::Queue> queue_;  // null until the first block is full
  std::vector<Block> blocks_;
  BlockHasher hasher_;
  size_t current_ = 0;
  int64_t used_ = 0;    // of the current block
  int64_t offset_ = 0;  // of the current block in the file
};

}  // namespace deeptide::checkpoint
