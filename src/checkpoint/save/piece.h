// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pieces of logical tensors: what a rank saves, and what it wants back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/region.h"
#include "checkpoint/format/role.h"
#include "checkpoint/format/safetensors.h"

namespace deeptide::checkpoint {

/// Moves elements [begin, begin + block.numel()) of a piece, counted in its region's order. Called from one thread.
/// Save: fills `block`; blocks are consecutive. Load: takes it over; blocks may be in any order.
/// Shapes: block (n,), contiguous, on the CPU, at most kBlockBytes; valid during the call only.
using BlockTransfer = std::function<void(int64_t begin, const at::Tensor& block)>;

/// The elements of a piece, in its region's order: a tensor, or a function for state that is not one tensor in memory.
class PieceData {
 public:
  PieceData() = default;
  /// Shapes: as many elements as the region; one-dimensional of any stride, or contiguous. Of any device.
  PieceData(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  PieceData(at::ScalarType dtype, BlockTransfer transfer) : dtype_(dtype), transfer_(std::move(transfer)) {}

  bool defined() const { return tensor_.defined() || transfer_; }
  at::ScalarType dtype() const { return tensor_.defined() ? tensor_.scalar_type() : dtype_; }
  /// Undefined when a function moves the elements.
  const at::Tensor& tensor() const { return tensor_; }
  const BlockTransfer& transfer() const { return transfer_; }
  /// Whether it can hold `numel` elements: true for every function.
  bool holds(int64_t numel) const;
  /// Elements [begin, begin + count).
  PieceData part(int64_t begin, int64_t count) const;

 private:
  at::Tensor tensor_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  BlockTransfer transfer_;
};

/// The same elements, rounded to `dtype` as they are read.
PieceData rounded(const PieceData& data, at::ScalarType dtype);

/// A piece that its program may change at any time.
inline constexpr int kAnytime = -1;

/// A region of a logical tensor, with its elements: to be written, or to be filled on load. May be empty.
/// A rank may have several pieces of one tensor. Of what a world saves, no two may share an element.
struct Piece {
  std::string name;  // of the logical parameter or buffer, any UTF-8
  Role role;
  Shape shape;  // of the whole logical tensor
  Region region;
  PieceData data;
  int changes_with = kAnytime;  // the group of pieces that change together, each time after an announcement
  int part = 0;                 // of the shard's files
  bool apart = false;           // in a file of its own, which later saves link to while its elements stay as they are

  /// Counts its elements. Units: bytes.
  int64_t bytes() const { return region.numel() * element_bytes(data.dtype()); }
};

}  // namespace deeptide::checkpoint
