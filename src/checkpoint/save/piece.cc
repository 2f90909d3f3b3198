// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pieces of logical tensors: what a rank saves, and what it wants back.
#include "checkpoint/save/piece.h"

#include <ATen/ops/empty.h>

namespace deeptide::checkpoint {

PieceData rounded(const PieceData& data, at::ScalarType dtype) {
  return {dtype, [data](int64_t begin, const at::Tensor& block) {
            if (data.tensor().defined()) {
              block.copy_(data.tensor().view({-1}).narrow(0, begin, block.numel()));
              return;
            }
            const at::Tensor exact = at::empty({block.numel()}, block.options().dtype(data.dtype()));
            data.transfer()(begin, exact);
            block.copy_(exact);
          }};
}

PieceData PieceData::part(int64_t begin, int64_t count) const {
  if (tensor_.defined()) return tensor_.view({-1}).narrow(0, begin, count);
  return {dtype_, [transfer = transfer_, begin](int64_t at, const at::Tensor& block) { transfer(begin + at, block); }};
}

bool PieceData::holds(int64_t numel) const {
  if (!tensor_.defined()) return static_cast<bool>(transfer_);
  return tensor_.numel() == numel && (tensor_.dim() == 1 || tensor_.is_contiguous());
}

}  // namespace deeptide::checkpoint
