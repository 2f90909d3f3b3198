// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies what is appended into the writer's blocks.
#include "checkpoint/save/block_writer.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <span>

namespace deeptide::checkpoint {

/// `data`: the writer's room, which holds `bytes` more.
void BlockWriter::fill(const char* data, int64_t bytes) {
  hasher_.update(data, bytes);
  writer_.fill(bytes);
}

void BlockWriter::append(const void* data, int64_t bytes) {
  for (const char* cursor = static_cast<const char*>(data); bytes > 0;) {
    const std::span<char> free = writer_.room();
    const int64_t taken = std::min(bytes, std::ssize(free));
    std::memcpy(free.data(), cursor, static_cast<size_t>(taken));
    fill(free.data(), taken);
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
  const auto options = at::TensorOptions().dtype(data.dtype());
  const int64_t width = static_cast<int64_t>(c10::elementSize(data.dtype()));
  const at::Tensor flat = tensor.defined() ? tensor.view({-1}) : tensor;
  for (int64_t begin = 0; begin < numel;) {
    const std::span<char> free = writer_.room();
    const int64_t count = std::min(numel - begin, std::ssize(free) / width);
    const at::Tensor part = at::from_blob(free.data(), {count}, options);
    tensor.defined() ? static_cast<void>(part.copy_(flat.narrow(0, begin, count))) : data.transfer()(begin, part);
    fill(free.data(), count * width);
    begin += count;
  }
}

}  // namespace deeptide::checkpoint
