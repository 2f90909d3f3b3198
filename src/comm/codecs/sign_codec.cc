// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lays scales before signs.
#include "comm/codecs/sign_codec.h"

#include <utility>

#include "numerics/rounding/sign_bits.h"
#include "numerics/sums/ordered_sum.h"

namespace deeptide::comm {

using at::Tensor;

namespace {

/// Messages are multiples of this, so that scales are aligned in every row.
constexpr int64_t kMessageAlignment = 16;

int64_t padded(int64_t bytes) { return (bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment; }

int64_t scale_bytes(int64_t num_scales) { return padded(num_scales * static_cast<int64_t>(sizeof(float))); }

}  // namespace

SignCodec::SignCodec(int64_t num_scales, std::vector<Piece> pieces, Tensor squares)
    : num_scales_(num_scales), pieces_(std::move(pieces)), squares_(std::move(squares)) {}

int64_t SignCodec::bytes(int64_t numel, int64_t num_scales) {
  return scale_bytes(num_scales) + padded(numerics::sign_bytes(numel));
}

/// Calls `use(bits, scale, values)` for each piece.
template <typename Use>
void SignCodec::for_pieces(const Tensor& message, const Tensor& values, const Use& use) const {
  const int64_t begin = scale_bytes(num_scales_);
  const Tensor scales = message.narrow(0, 0, begin).view(at::kFloat);
  const Tensor signs = message.narrow(0, begin, message.numel() - begin);
  for (const Piece& piece : pieces_) {
    use(signs.narrow(0, piece.begin / 8, numerics::sign_bytes(piece.count)), scales.narrow(0, piece.scale, 1),
        values.narrow(0, piece.begin, piece.count));
  }
}

void SignCodec::encode(const Tensor& values, const Tensor& message) const {
  for_pieces(message, values, [&](const Tensor& bits, const Tensor& scale, const Tensor& part) {
    numerics::ordered_squares(part, squares_);
    scale.copy_(squares_.div(static_cast<double>(part.numel())).sqrt_());
    numerics::split_signs(part, scale, bits);
  });
}

void SignCodec::decode(const Tensor& message, const Tensor& values) const {
  for_pieces(message, values, [](const Tensor& bits, const Tensor& scale, const Tensor& part) {
    numerics::set_signs(bits, scale, part);
  });
}

void SignCodec::add(const Tensor& message, double divisor, const Tensor& values) const {
  for_pieces(message, values, [&](const Tensor& bits, const Tensor& scale, const Tensor& part) {
    numerics::add_signs(bits, scale.div(divisor), part);
  });
}

}  // namespace deeptide::comm
