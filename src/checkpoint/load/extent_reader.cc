// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what a saved region and a wanted one share, and checks it against the hashes of the save.
#include "checkpoint/load/extent_reader.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/save/block_writer.h"

namespace deeptide::checkpoint {
namespace {

/// Compares what was read of an extent with the hashes of its blocks. Offsets are bytes from the extent's start.
class BlockCheck {
 public:
  BlockCheck(StreamedReads& files, const Logical& saved, const Extent& extent, int64_t width)
      : files_(files), saved_(saved), extent_(extent), bytes_(extent.region.numel() * width), width_(width) {
    const int64_t blocks = (bytes_ + kHashedBlockBytes - 1) / kHashedBlockBytes;
    if (static_cast<int64_t>(extent.hashes.size()) == blocks) done_.resize(blocks);
    if (done_.empty() && !extent.hashes.empty()) fail(0, "has not as many hashes as blocks");
  }

  /// Compares the blocks that were read whole, and reads those whole of which the middle was: of ranks that share a
  /// block one reads its middle, so that one compares it.
  void check(int64_t begin, int64_t bytes, const char* data) {
    const int64_t end = begin + bytes;
    for (int64_t block = begin / kHashedBlockBytes; block < std::ssize(done_) && block * kHashedBlockBytes < end;
         ++block) {
      const int64_t first = block * kHashedBlockBytes;
      const int64_t size = std::min(kHashedBlockBytes, bytes_ - first);
      if (done_[block]) continue;
      if (begin <= first && first + size <= end) {
        compare(block, data + (first - begin), size);
      } else if (const int64_t middle = first + size / 2; begin <= middle && middle < end) {
        read_and_check(block);
      }
    }
  }

  void read_and_check(int64_t block) {
    const int64_t first = block * kHashedBlockBytes;
    const int64_t size = std::min(kHashedBlockBytes, bytes_ - first);
    if (!whole_) whole_ = std::make_unique_for_overwrite<char[]>(kHashedBlockBytes);
    files_.read(extent_.file, extent_.offset + first, whole_.get(), size);
    compare(block, whole_.get(), size);
  }

 private:
  void compare(int64_t block, const char* data, int64_t size) {
    if (ContentHash::of(data, size) != extent_.hashes[block]) fail(block, "was changed since it was saved");
    done_[block] = true;
  }

  [[noreturn]] void fail(int64_t block, const std::string& what) const {
    const int64_t first = block * kHashedBlockBytes;
    const int64_t last = std::min(first + kHashedBlockBytes, bytes_);
    throw CheckpointError("'" + saved_.key + "' is damaged: of the piece " + extent_.region.text() + ", the block of " +
                          "elements [" + std::to_string(first / width_) + ", " + std::to_string(last / width_) + ") " +
                          what + ", at byte " + std::to_string(extent_.offset + first) + " of " +
                          files_.path(extent_.file) + "; use another checkpoint");
  }

  StreamedReads& files_;
  const Logical& saved_;
  const Extent& extent_;
  int64_t bytes_;
  int64_t width_;
  std::vector<bool> done_;  // by block; empty without hashes
  std::unique_ptr<char[]> whole_;
};

class Batch {
 public:
  Batch(StreamedReads& files, const Logical& saved, const Extent& extent, ElementSink& sink)
      : files_(files),
        extent_(extent),
        width_(element_bytes(saved.dtype)),
        sink_(sink),
        check_(files, saved, extent, width_) {}

  void add(const SharedRun& run) {
    const int64_t block = kBlockBytes / width_;
    if (run.count > block) {  // cut where hashed blocks end
      for (int64_t done = 0; done < run.count;) {
        const int64_t count = std::min(block - (run.a + done) % block, run.count - done);
        add({run.a + done, run.b + done, count});
        done += count;
      }
      return;
    }
    if (!runs_.empty()) {
      const int64_t gap = run.a - end();
      if (gap * width_ > kMaxGapBytes || run.a + run.count - runs_.front().a > block) flush();
    }
    runs_.push_back(run);
  }

  void flush() {
    if (runs_.empty()) return;
    const int64_t begin = runs_.front().a;
    const int64_t bytes = (end() - begin) * width_;
    const int64_t offset = extent_.offset + begin * width_;
    char* memory = runs_.size() == 1 ? sink_.memory(runs_.front().b) : nullptr;
    if (memory != nullptr) {
      files_.read(extent_.file, offset, memory, bytes);
      check_.check(begin * width_, bytes, memory);
    } else {
      if (!staged_) staged_ = std::make_unique_for_overwrite<char[]>(kBlockBytes);
      files_.read(extent_.file, offset, staged_.get(), bytes);
      check_.check(begin * width_, bytes, staged_.get());
      for (const SharedRun& run : runs_) sink_.put(run.b, staged_.get() + (run.a - begin) * width_, run.count);
    }
    runs_.clear();
  }

 private:
  int64_t end() const { return runs_.back().a + runs_.back().count; }

  StreamedReads& files_;
  const Extent& extent_;
  int64_t width_;
  ElementSink& sink_;
  BlockCheck check_;
  std::vector<SharedRun> runs_;  // in the file's order, close together, at most a block
  std::unique_ptr<char[]> staged_;
};

}  // namespace

void read_shared(StreamedReads& files, const Logical& saved, const Extent& extent, const Region& wanted,
                 ElementSink& sink) {
  Batch batch(files, saved, extent, sink);
  for_each_shared_run(saved.shape, extent.region, wanted, [&](const SharedRun& run) { batch.add(run); });
  batch.flush();
}

void announce_shared(StreamedReads& files, const Logical& saved, const Extent& extent, const Region& wanted) {
  if (!extent.strides.empty()) return;  // few are, and small
  const int64_t width = element_bytes(saved.dtype);
  for_each_shared_run(saved.shape, extent.region, wanted, [&](const SharedRun& run) {
    files.announce(extent.file, extent.offset + run.a * width, run.count * width);
  });
}

void announce_whole(StreamedReads& files, const Logical& saved) {
  announce_range(files, saved, 0, numel_of(saved.shape, saved.key));
}

void announce_range(StreamedReads& files, const Logical& saved, int64_t begin, int64_t end) {
  const int64_t block = kHashedBlockBytes / element_bytes(saved.dtype);
  for (; begin < end; begin += block) {
    const Region wanted = Region::range(begin, std::min(end, begin + block));
    for (const Extent& extent : saved.extents) {
      if (num_shared(saved.shape, extent.region, wanted) > 0) announce_shared(files, saved, extent, wanted);
    }
  }
}

int64_t num_hashed_blocks(const Extent& extent) { return std::ssize(extent.hashes); }

void announce_blocks(StreamedReads& files, const Logical& saved, const Extent& extent, int64_t first, int64_t stride) {
  const int64_t bytes = extent.region.numel() * element_bytes(saved.dtype);
  for (int64_t block = first; block < num_hashed_blocks(extent); block += stride) {
    const int64_t begin = block * kHashedBlockBytes;
    files.announce(extent.file, extent.offset + begin, std::min(kHashedBlockBytes, bytes - begin));
  }
}

void verify_blocks(StreamedReads& files, const Logical& saved, const Extent& extent, int64_t first, int64_t stride) {
  BlockCheck check(files, saved, extent, element_bytes(saved.dtype));
  for (int64_t block = first; block < num_hashed_blocks(extent); block += stride) check.read_and_check(block);
}

}  // namespace deeptide::checkpoint
