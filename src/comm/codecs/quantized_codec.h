// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Messages of whole numbers of 8 or 4 bits and one scale per block.
#pragma once

#include "comm/codecs/codec.h"
#include "numerics/rounding/quantized.h"

namespace deeptide::comm {

/// Encodes like numerics::quantize. `lost`: `encode` adds what rounding takes; null: nobody asks. Tensors on the CPU.
class QuantizedCodec : public Codec {
 public:
  explicit QuantizedCodec(int bits, numerics::QuantizationLoss* lost = nullptr) : bits_(bits), lost_(lost) {}

  int64_t bytes(const at::Tensor& values) const override { return numerics::quantized_bytes(values.numel(), bits_); }
  void encode(const at::Tensor& values, const at::Tensor& message) const override {
    const numerics::QuantizationLoss lost = numerics::quantize(values, bits_, message);
    if (lost_ != nullptr) lost_->add(lost);
  }
  void decode(const at::Tensor& message, const at::Tensor& values) const override {
    numerics::dequantize(message, bits_, values);
  }

 private:
  int bits_;
  numerics::QuantizationLoss* lost_;
};

}  // namespace deeptide::comm
