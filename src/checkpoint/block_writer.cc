// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends bytes and a piece's elements to a file in large blocks at aligned offsets.
#include "checkpoint/block_writer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace deeptide::checkpoint {

BlockWriter::BlockWriter(File file) : file_(std::move(file)), block_(new char[kBlockBytes]) {}

void BlockWriter::append(const void* data, int64_t bytes) {
  const char* cursor = static_cast<const char*>(data);
  while (bytes > 0) {
    int64_t taken;
    if (used_ == 0 && bytes >= kBlockBytes) {
      taken = bytes - bytes % kBlockBytes;
      file_.write_at(cursor, taken, offset_);
      offset_ += taken;
    } else {
      taken = std::min(bytes, kBlockBytes - used_);
      std::memcpy(block_.get() + used_, cursor, taken);
      used_ += taken;
      if (used_ == kBlockBytes) {
        file_.write_at(block_.get(), used_, offset_);
        offset_ += used_;
        used_ = 0;
      }
    }
    cursor += taken;
    bytes -= taken;
  }
}

void BlockWriter::append(const PieceData& data, int64_t numel) {
  const at::Tensor& tensor = data.tensor();
  if (tensor.defined() && tensor.is_cpu() && tensor.is_contiguous()) {
    append(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    return;
  }
  const int64_t width = static_cast<int64_t>(c10::elementSize(data.dtype()));
  const int64_t chunk = std::min(numel, kBlockBytes / width);
  const at::Tensor flat = tensor.defined() ? tensor.view({-1}) : tensor;
  at::Tensor staged;
  if (!tensor.defined()) staged = at::empty({chunk}, at::TensorOptions().dtype(data.dtype()));
  for (int64_t begin = 0; begin < numel; begin += chunk) {
    const int64_t count = std::min(chunk, numel - begin);
    at::Tensor part;
    if (tensor.defined()) {
      part = flat.narrow(0, begin, count).to(at::kCPU).contiguous();
    } else {
      part = staged.narrow(0, 0, count);
      data.transfer()(begin, part);
    }
    append(part.const_data_ptr(), count * width);
  }
}

void BlockWriter::finish() {
  file_.write_at(block_.get(), used_, offset_);
  offset_ += used_;
  used_ = 0;
  file_.sync();
}

}  // namespace deeptide::checkpoint
