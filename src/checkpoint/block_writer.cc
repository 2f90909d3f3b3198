// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends bytes and tensors to a file in large blocks at aligned offsets.
#include "checkpoint/block_writer.h"

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

void BlockWriter::append(const at::Tensor& data) {
  if (data.is_cpu() && data.is_contiguous()) {
    append(data.const_data_ptr(), static_cast<int64_t>(data.nbytes()));
    return;
  }
  const at::Tensor flat = data.view({-1});
  const int64_t chunk = std::max<int64_t>(1, kBlockBytes / static_cast<int64_t>(flat.element_size()));
  for (int64_t begin = 0; begin < flat.numel(); begin += chunk) {
    const at::Tensor part = flat.narrow(0, begin, std::min(chunk, flat.numel() - begin)).to(at::kCPU).contiguous();
    append(part.const_data_ptr(), static_cast<int64_t>(part.nbytes()));
  }
}

void BlockWriter::finish() {
  file_.write_at(block_.get(), used_, offset_);
  offset_ += used_;
  used_ = 0;
  file_.sync();
}

}  // namespace deeptide::checkpoint
