// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps the blocks of a file that is written.
#include "checkpoint/save/aligned_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace deeptide::checkpoint {
namespace {

constexpr int64_t kLeastBlockBytes = int64_t{64} << 10;

}  // namespace

AlignedWriter::AlignedWriter(const std::string& path, int64_t file_bytes, int64_t buffer_bytes)
    : file_(File::create_direct(path)),
      block_bytes_(std::clamp(io::align_up(file_bytes), kLeastBlockBytes, kBlockBytes)),
      blocks_(std::max<size_t>(2, static_cast<size_t>(buffer_bytes / kBlockBytes))) {}

AlignedWriter::~AlignedWriter() { queue_.reset(); }

std::span<char> AlignedWriter::room() {
  if (!blocks_[current_].memory) take_memory();
  const Block& block = blocks_[current_];
  return {block.memory.get() + used_, static_cast<size_t>(block.room - used_)};
}

/// Two blocks may be small. Where there is no memory for another, those that are there serve.
void AlignedWriter::take_memory() {
  Block& block = blocks_[current_];
  block.memory = io::allocate_aligned(block_bytes_, current_ < 2 ? kLeastBlockBytes : block_bytes_);
  block.room = block_bytes_;
  if (block.memory) return;
  if (current_ == 0)
    fail("take " + std::to_string(kLeastBlockBytes) + " bytes of memory to write", file_.path(), ENOMEM);
  blocks_.resize(current_);
  current_ = 0;
  settle(blocks_[current_]);
}

void AlignedWriter::fill(int64_t bytes) {
  used_ += bytes;
  if (used_ == blocks_[current_].room) start(used_);
}

/// Starts to write the current block, and goes on to the next one once that is free.
void AlignedWriter::start(int64_t bytes) {
  Block& block = blocks_[current_];
  block.offset = offset_;
  block.bytes = bytes;
  const int refused = refusal("write", file_.path());
  if (refused != 0)
    fail("write " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset_) + " of", file_.path(),
         refused);
  if (!queue_) queue_ = io::make_queue(static_cast<int>(blocks_.size()));
  block.ticket = queue_->start({file_.descriptor(), offset_, block.memory.get(), bytes, /*read=*/false});
  offset_ += std::exchange(used_, 0);
  current_ = (current_ + 1) % blocks_.size();
  settle(blocks_[current_]);
}

/// A short write does not say why: the file's own call is asked again.
void AlignedWriter::settle(Block& block) {
  if (block.ticket == 0) return;
  const int error = queue_->wait(std::exchange(block.ticket, 0));
  if (error != 0) file_.write_at(block.memory.get(), block.bytes, block.offset);
}

void AlignedWriter::append(const void* data, int64_t bytes) {
  for (const char* cursor = static_cast<const char*>(data); bytes > 0;) {
    const std::span<char> free = room();
    const int64_t taken = std::min(bytes, std::ssize(free));
    std::memcpy(free.data(), cursor, static_cast<size_t>(taken));
    fill(taken);
    cursor += taken;
    bytes -= taken;
  }
}

/// O_DIRECT moves whole blocks of the disk: what lies beyond the end is cut off again.
void AlignedWriter::finish() {
  const int64_t size = written_bytes();
  if (used_ > 0) {
    const int64_t bytes = file_.is_direct() ? io::align_up(used_) : used_;
    std::memset(room().data(), 0, static_cast<size_t>(bytes - used_));
    start(bytes);
  }
  for (Block& block : blocks_) settle(block);
  file_.cut(size);
  file_.sync();
}

}  // namespace deeptide::checkpoint
