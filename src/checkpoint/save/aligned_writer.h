// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends bytes to a file in large blocks at aligned offsets, several under way at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/content_hash.h"
#include "checkpoint/format/file_io.h"
#include "io/aligned.h"
#include "io/queue.h"

namespace deeptide::checkpoint {

/// Bytes per write, or less where memory is short.
inline constexpr int64_t kBlockBytes = kHashedBlockBytes;
/// Memory that the blocks of a save take unless its user names another amount.
inline constexpr int64_t kBufferBytes = int64_t{64} << 20;

/// Gathers what is appended in aligned blocks of memory and writes each past the page cache (O_DIRECT, where the
/// filesystem has it) while the next one fills. Waits for the oldest write where no block is free.
class AlignedWriter {
 public:
  /// `file_bytes`: what it will hold; no block is larger. `buffer_bytes`: of all blocks; there are at least two, unless
  /// memory is short. They come to be as they are needed.
  AlignedWriter(const std::string& path, int64_t file_bytes, int64_t buffer_bytes = kBufferBytes);
  /// Waits for the writes under way.
  ~AlignedWriter();
  AlignedWriter(const AlignedWriter&) = delete;

  void append(const void* data, int64_t bytes);
  /// Returns the rest of the current block, for its next bytes: one at least.
  std::span<char> room();
  /// So many of them are there now.
  void fill(int64_t bytes);
  /// Writes what is left, waits for all writes and fsyncs. Without it the file is incomplete.
  void finish();
  int64_t written_bytes() const { return offset_ + used_; }

 private:
  struct Block {
    io::AlignedMemory memory;
    int64_t room = 0;
    io::Queue::Ticket ticket = 0;  // 0: none under way
    int64_t offset = 0;            // in the file
    int64_t bytes = 0;             // of the transfer under way
  };

  void take_memory();
  void start(int64_t bytes);
  void settle(Block& block);

  File file_;
  int64_t block_bytes_;               // of the next one: no more than memory allowed for the last
  std::unique_ptr<io::Queue> queue_;  // null until the first block is full
  std::vector<Block> blocks_;
  size_t current_ = 0;
  int64_t used_ = 0;    // of the current block
  int64_t offset_ = 0;  // of the current block in the file
};

}  // namespace deeptide::checkpoint
