// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what a saved region and a wanted one share, from a file into a piece's data.
#include "checkpoint/load/transfer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/load/extent_reader.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

/// Memory, a tensor that needs copies, or a function.
class Destination final : public ElementSink {
 public:
  Destination(const PieceData& data, at::ScalarType saved) : data_(data), dtype_(saved), width_(element_bytes(saved)) {
    if (!data.tensor().defined()) return;
    flat_ = data.tensor().view({-1});
    if (flat_.is_cpu() && flat_.is_contiguous() && flat_.scalar_type() == saved) {
      memory_ = static_cast<char*>(flat_.mutable_data_ptr());
    }
  }

  char* memory(int64_t position) override { return memory_ == nullptr ? nullptr : memory_ + position * width_; }

  void put(int64_t position, const char* elements, int64_t count) override {
    if (memory_ != nullptr) {
      std::memcpy(memory(position), elements, static_cast<size_t>(count * width_));
      return;
    }
    // from_blob takes no const memory; nothing writes to it.
    const Tensor block = at::from_blob(const_cast<char*>(elements), {count}, at::TensorOptions().dtype(dtype_));
    if (flat_.defined()) {
      flat_.narrow(0, position, count).copy_(block);
    } else {
      data_.transfer()(position, block.to(data_.dtype()));
    }
  }

 private:
  const PieceData& data_;
  at::ScalarType dtype_;
  int64_t width_;
  Tensor flat_;
  char* memory_ = nullptr;
};

/// Reads and compares all of a tensor whose elements lie in another order than its own: few do, and they are small.
void transfer_strided(StreamedReads& files, const Logical& saved, const Extent& extent, const Piece& wanted,
                      ElementSink& sink) {
  verify_blocks(files, saved, extent, 0, 1);
  int64_t span = 1;
  for (size_t d = 0; d < saved.shape.size(); ++d) span += (saved.shape[d] - 1) * extent.strides[d];
  const Tensor memory = at::empty({span}, at::TensorOptions().dtype(saved.dtype).device(at::kCPU));
  files.read(extent.file, extent.offset, memory.mutable_data_ptr(), static_cast<int64_t>(memory.nbytes()));
  const Tensor flat = memory.as_strided(saved.shape, extent.strides).reshape({-1});
  const auto* elements = static_cast<const char*>(flat.const_data_ptr());
  const int64_t width = element_bytes(saved.dtype);
  for_each_shared_run(saved.shape, extent.region, wanted.region,
                      [&](const SharedRun& run) { sink.put(run.b, elements + run.a * width, run.count); });
}

}  // namespace

void fill(const Piece& wanted, int64_t position, const Tensor& block) {
  Destination destination(wanted.data, block.scalar_type());
  destination.put(position, static_cast<const char*>(block.const_data_ptr()), block.numel());
}

void transfer(StreamedReads& files, const Logical& saved, const Extent& extent, const Piece& wanted) {
  Destination destination(wanted.data, saved.dtype);
  if (!extent.strides.empty()) return transfer_strided(files, saved, extent, wanted, destination);
  read_shared(files, saved, extent, wanted.region, destination);
}

}  // namespace deeptide::checkpoint
