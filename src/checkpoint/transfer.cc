// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what a saved region and a wanted one share, from a file into a piece's data.
#include "checkpoint/transfer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/block_writer.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

// Reading this many unwanted bytes takes less time than another system call.
constexpr int64_t kMaxGapBytes = int64_t{64} << 10;

// Where the elements go: memory, a tensor that needs copies, or a function.
class Destination {
 public:
  Destination(const PieceData& data, at::ScalarType saved) : data_(data), dtype_(saved) {
    if (!data.tensor().defined()) return;
    flat_ = data.tensor().view({-1});
    if (flat_.is_cpu() && flat_.is_contiguous() && flat_.scalar_type() == saved) {
      memory_ = static_cast<char*>(flat_.mutable_data_ptr());
    }
  }
  /// Null when the elements cannot be read in place.
  char* memory(int64_t position) const {
    return memory_ == nullptr ? nullptr : memory_ + position * static_cast<int64_t>(c10::elementSize(dtype_));
  }
  /// Shapes: elements (n,), of the saved dtype, on the CPU.
  void put(int64_t position, const Tensor& elements) const {
    if (memory_ != nullptr) {
      std::memcpy(memory(position), elements.const_data_ptr(), elements.nbytes());
    } else if (flat_.defined()) {
      flat_.narrow(0, position, elements.numel()).copy_(elements);
    } else {
      data_.transfer()(position, elements.to(data_.dtype()));
    }
  }

 private:
  const PieceData& data_;
  at::ScalarType dtype_;
  Tensor flat_;
  char* memory_ = nullptr;
};

class Batch {
 public:
  Batch(const File& file, const Extent& extent, at::ScalarType dtype, const Destination& destination)
      : file_(file),
        offset_(extent.offset),
        dtype_(dtype),
        width_(static_cast<int64_t>(c10::elementSize(dtype))),
        destination_(destination) {}

  void add(const SharedRun& run) {
    const int64_t block = kBlockBytes / width_;
    if (destination_.memory(0) == nullptr && run.count > block) {
      for (int64_t begin = 0; begin < run.count; begin += block) {
        add({run.a + begin, run.b + begin, std::min(block, run.count - begin)});
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
    const int64_t count = end() - begin;
    const int64_t offset = offset_ + begin * width_;
    char* memory = runs_.size() == 1 ? destination_.memory(runs_.front().b) : nullptr;
    if (memory != nullptr) {
      file_.read_at(memory, count * width_, offset);
    } else {
      if (!staged_.defined() || staged_.numel() < count) {
        staged_ = at::empty({count}, at::TensorOptions().dtype(dtype_).device(at::kCPU));
      }
      file_.read_at(staged_.mutable_data_ptr(), count * width_, offset);
      for (const SharedRun& run : runs_) destination_.put(run.b, staged_.narrow(0, run.a - begin, run.count));
    }
    runs_.clear();
  }

 private:
  int64_t end() const { return runs_.back().a + runs_.back().count; }

  const File& file_;
  int64_t offset_;
  at::ScalarType dtype_;
  int64_t width_;
  const Destination& destination_;
  std::vector<SharedRun> runs_;  // in the file's order, close together, at most a block unless it is one run
  Tensor staged_;
};

}  // namespace

void transfer(const File& file, const Logical& saved, const Extent& extent, const Piece& wanted) {
  const Destination destination(wanted.data, saved.dtype);
  Batch batch(file, extent, saved.dtype, destination);
  for_each_shared_run(saved.shape, extent.region, wanted.region, [&](const SharedRun& run) { batch.add(run); });
  batch.flush();
}

}  // namespace deeptide::checkpoint
