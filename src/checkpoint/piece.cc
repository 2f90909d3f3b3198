// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pieces of logical tensors: what a rank saves, and what it wants back.
#include "checkpoint/piece.h"

namespace deeptide::checkpoint {

bool PieceData::holds(int64_t numel) const {
  if (!tensor_.defined()) return static_cast<bool>(transfer_);
  return tensor_.numel() == numel && (tensor_.dim() == 1 || tensor_.is_contiguous());
}

}  // namespace deeptide::checkpoint
