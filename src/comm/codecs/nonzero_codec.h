// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Messages of tensors that are mostly zero, such as an embedding's gradient: blocks of zeros stay behind.
#pragma once

#include "comm/codecs/codec.h"

namespace deeptide::comm {

/// One bit per block of 32 elements, then the blocks that are not zero. What travels of a row of a table, 64 or more
/// elements, is little more than the row. Bits decide, so that a negative zero travels. Tensors on the CPU, of any
/// type.
class NonzeroCodec : public Codec {
 public:
  static constexpr int64_t kBlock = 32;

  int64_t bytes(const at::Tensor& values) const override;
  void encode(const at::Tensor& values, const at::Tensor& message) const override;
  void decode(const at::Tensor& message, const at::Tensor& values) const override;
};

}  // namespace deeptide::comm
