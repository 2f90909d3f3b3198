// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Announces what lies a fixed number of bytes ahead, each byte once.
#include "checkpoint/load/read_ahead.h"

#include <algorithm>

#include "checkpoint/format/content_hash.h"
#include "checkpoint/load/extent_reader.h"

namespace deeptide::checkpoint {
namespace {

constexpr int64_t kAheadBytes = 4 * kHashedBlockBytes;

}  // namespace

void ReadAhead::add(const Logical& tensor) {
  const int64_t numel = numel_of(tensor.shape, tensor.key);
  tensors_.push_back({&tensor, numel, bytes_});
  bytes_ += numel * element_bytes(tensor.dtype);
}

void ReadAhead::read(size_t tensor, int64_t end) {
  const Reading& now = tensors_[tensor];
  const int64_t target = now.begin + end * element_bytes(now.tensor->dtype) + kAheadBytes;
  if (tensor > next_ || (tensor == next_ && end > within_)) {
    next_ = tensor;
    within_ = end;
  }
  while (next_ < tensors_.size()) {
    const Reading& coming = tensors_[next_];
    const int64_t width = element_bytes(coming.tensor->dtype);
    if (coming.begin + within_ * width >= target) return;
    const int64_t last = std::min(coming.numel, within_ + kHashedBlockBytes / width);
    const Region wanted = Region::range(within_, last);
    for (const Extent& extent : coming.tensor->extents) {
      if (num_shared(coming.tensor->shape, extent.region, wanted) == 0) continue;
      announce(File::open(folder_ + "/" + extent.file), *coming.tensor, extent, wanted);
    }
    within_ = last;
    if (last < coming.numel) continue;
    ++next_;
    within_ = 0;
  }
}

}  // namespace deeptide::checkpoint
