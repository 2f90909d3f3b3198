// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Messages of one bit per element and one scale per piece.
#pragma once

#include <vector>

#include "comm/codecs/codec.h"

namespace deeptide::comm {

/// A piece's scale is the root of its mean square; `encode` leaves what the signs leave out in `values`. A message has
/// room for `num_scales` scales, then the signs. Elements in no piece are neither read nor written. Values are fp32.
class SignCodec : public Codec {
 public:
  /// Elements of a tensor with one scale.
  struct Piece {
    int64_t begin;  // a multiple of 8
    int64_t count;
    int64_t scale;  // its number
  };
  /// `squares`: (1,) fp64, scratch memory where the values lie.
  SignCodec(int64_t num_scales, std::vector<Piece> pieces, at::Tensor squares);

  static int64_t bytes(int64_t numel, int64_t num_scales);
  int64_t bytes(const at::Tensor& values) const override { return bytes(values.numel(), num_scales_); }
  void encode(const at::Tensor& values, const at::Tensor& message) const override;
  void decode(const at::Tensor& message, const at::Tensor& values) const override;
  /// Adds what the message holds divided by `divisor`.
  void add(const at::Tensor& message, double divisor, const at::Tensor& values) const;

 private:
  template <typename Use>
  void for_pieces(const at::Tensor& message, const at::Tensor& values, const Use& use) const;

  int64_t num_scales_;
  std::vector<Piece> pieces_;
  at::Tensor squares_;
};

}  // namespace deeptide::comm
