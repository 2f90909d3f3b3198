// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Quantized blocks equal an oracle bit for bit, at every length, and lose no more than they say.
#include "numerics/rounding/quantized.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace deeptide::numerics {
namespace {

using at::Tensor;

constexpr int64_t kCounts[] = {0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 1000, 8191, 8192, 8193, 70'001, 300'000};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
/// fp32 rounds the quotient and the product, each by half a last place of at most `most` scales.
constexpr double kRounding = 3e-7;

struct Plain {
  std::vector<float> scales, values;  // decoded
  std::vector<int> numbers;
  double lost = 0.0, all = 0.0, largest = 0.0;
};

/// One element after the other.
Plain oracle(const Tensor& given, int bits) {
  const int most = (1 << (bits - 1)) - 1;
  const float* x = given.const_data_ptr<float>();
  Plain plain;
  for (int64_t begin = 0; begin < given.numel(); begin += kQuantizedBlock) {
    const int64_t end = std::min(given.numel(), begin + kQuantizedBlock);
    float largest = 0.0F;
    for (int64_t i = begin; i < end; ++i) largest = std::isfinite(x[i]) ? std::max(largest, std::fabs(x[i])) : largest;
    float scale = largest / static_cast<float>(most);
    if (scale < std::numeric_limits<float>::min()) scale = 0.0F;
    plain.scales.push_back(scale);
    for (int64_t i = begin; i < end; ++i) {
      const bool finite = std::isfinite(x[i]);
      const int number = !finite ? -most - 1 : scale == 0.0F ? 0 : static_cast<int>(std::nearbyint(x[i] / scale));
      plain.numbers.push_back(number);
      plain.values.push_back(finite ? static_cast<float>(number) * scale : kNan);
      if (!finite || scale == 0.0F) continue;
      const double lost = std::fabs(static_cast<double>(x[i]) - plain.values.back());
      plain.lost += lost * lost;
      plain.all += static_cast<double>(x[i]) * x[i];
      plain.largest = std::max(plain.largest, lost / largest);
    }
  }
  return plain;
}

/// The whole number of an element in a message.
int number_at(const Tensor& message, int64_t numel, int64_t element, int bits) {
  const int64_t block = element / kQuantizedBlock, at = element % kQuantizedBlock, half = kQuantizedBlock / 2;
  const int64_t blocks = (numel + kQuantizedBlock - 1) / kQuantizedBlock;
  const uint8_t* bytes = message.const_data_ptr<uint8_t>() + blocks * 4 + block * kQuantizedBlock * bits / 8;
  if (bits == 8) return std::bit_cast<int8_t>(bytes[at]);
  const int nibble = bytes[at % half] >> (at < half ? 0 : 4) & 15;
  return nibble < 8 ? nibble : nibble - 16;
}

/// Values of several magnitudes, in a view that is off a vector's alignment.
Tensor drawn(int64_t count) {
  const Tensor values = at::randn({count + 3}).narrow(0, 3, count);
  if (count > 300) values.narrow(0, 130, 150).mul_(1e-6);
  return values;
}

void expect_as_oracle(const Tensor& values, int bits) {
  const int64_t count = values.numel();
  const Plain plain = oracle(values, bits);
  const Tensor message = at::full({quantized_bytes(count, bits)}, 0xAA, at::kByte);
  const QuantizationLoss loss = quantize(values, bits, message);
  if (count > 0) {
    ASSERT_EQ(std::memcmp(message.const_data_ptr(), plain.scales.data(), plain.scales.size() * sizeof(float)), 0);
  }
  for (int64_t i = 0; i < count; ++i) {
    ASSERT_EQ(number_at(message, count, i, bits), plain.numbers[static_cast<size_t>(i)]) << i << " of " << count;
  }
  const Tensor decoded = at::full({count + 1}, 7.0f);
  dequantize(message, bits, decoded.narrow(0, 0, count));
  EXPECT_EQ(decoded[count].item<float>(), 7.0f) << "what is behind stays";
  for (int64_t i = 0; i < count; ++i) {
    const float got = decoded.const_data_ptr<float>()[i], expected = plain.values[static_cast<size_t>(i)];
    ASSERT_TRUE(std::isnan(expected) ? std::isnan(got) : got == expected) << i << " of " << count;
  }
  EXPECT_NEAR(loss.squares, plain.lost, 1e-4 * plain.lost);
  EXPECT_NEAR(loss.of_squares, plain.all, 1e-5 * plain.all);
  EXPECT_NEAR(loss.largest, plain.largest, 1e-4 * plain.largest + kRounding);
  EXPECT_LE(plain.largest, largest_loss(bits) + kRounding);
}

class Quantized : public testing::TestWithParam<int> {};

TEST_P(Quantized, AreTheBitsOfTheOracle) {
  at::manual_seed(1);
  for (const int64_t count : kCounts) {
    expect_as_oracle(drawn(count), GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(Quantized, KeepZerosAndBlocksOfOneMagnitude) {
  Tensor values = at::zeros({4 * kQuantizedBlock + 1});
  values.narrow(0, kQuantizedBlock, kQuantizedBlock).fill_(-3.25f);
  values[4 * kQuantizedBlock] = 1e30f;
  const Tensor message = at::empty({quantized_bytes(values.numel(), GetParam())}, at::kByte);
  const Tensor decoded = at::empty_like(values);
  const QuantizationLoss loss = quantize(values, GetParam(), message);
  dequantize(message, GetParam(), decoded);
  EXPECT_TRUE(at::allclose(decoded, values, /*rtol=*/2e-7, /*atol=*/0.0)) << "the scale is a quotient in fp32";
  EXPECT_LE(loss.largest, kRounding);
  expect_as_oracle(values, GetParam());
}

/// Tinier numbers have no scale; the largest ones have.
TEST_P(Quantized, CountTheTiniestBlocksAsZeros) {
  for (const float magnitude : {1e-44f, 1e-38f, 1e-37f, 1e-35f, 1e-20f, 1e20f, 3.4e38f}) {
    Tensor values = at::randn({kQuantizedBlock}).clamp_(-1, 1);
    values[5] = 1.0f;
    expect_as_oracle(values * magnitude, GetParam());
  }
  const Tensor message = at::empty({quantized_bytes(1, GetParam())}, at::kByte), decoded = at::full({1}, 3.0f);
  const QuantizationLoss loss = quantize(at::full({1}, 1e-38f), GetParam(), message);
  dequantize(message, GetParam(), decoded);
  EXPECT_EQ(decoded.item<float>(), 0.0f);
  EXPECT_EQ(loss.of_squares, 0.0);
}

TEST_P(Quantized, MarkWhatIsNotFiniteAndKeepItsNeighbours) {
  at::manual_seed(3);
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    for (const int64_t at : {int64_t{0}, int64_t{63}, int64_t{64}, int64_t{127}, int64_t{128}, int64_t{199}}) {
      Tensor values = drawn(200);
      const Tensor whole = values.clone();
      values[at] = bad;
      expect_as_oracle(values, GetParam());
      const Tensor message = at::empty({quantized_bytes(200, GetParam())}, at::kByte), decoded = at::empty({200});
      quantize(values, GetParam(), message);
      dequantize(message, GetParam(), decoded);
      EXPECT_EQ(decoded.isnan().sum().item<int64_t>(), 1);
      EXPECT_TRUE(std::isnan(decoded[at].item<float>()));
    }
  }
  expect_as_oracle(at::full({130}, kNan), GetParam());
}

TEST_P(Quantized, RoundHalvesToEven) {
  Tensor values = at::zeros({kQuantizedBlock});
  const auto most = static_cast<float>(most_quantized(GetParam()));
  values[0] = most;  // the scale is 1
  for (int i = 1; i < 13; ++i) values[i] = static_cast<float>(i - 7) + 0.5f;
  const Tensor message = at::empty({quantized_bytes(kQuantizedBlock, GetParam())}, at::kByte);
  quantize(values, GetParam(), message);
  for (int i = 1; i < 13; ++i) EXPECT_EQ(number_at(message, kQuantizedBlock, i, GetParam()) % 2, 0) << i;
}

TEST_P(Quantized, AreRefusedIfTheyDoNotFit) {
  const Tensor values = at::zeros({200}), message = at::empty({quantized_bytes(200, GetParam())}, at::kByte);
  EXPECT_THROW(quantize(values, GetParam(), message.narrow(0, 1, message.numel() - 1)), c10::ValueError);
  EXPECT_THROW(quantize(values.to(at::kBFloat16), GetParam(), message), c10::ValueError);
  EXPECT_THROW(dequantize(message, GetParam(), values.narrow(0, 0, 100)), c10::ValueError);
  EXPECT_THROW(quantize(values, 6, message), c10::ValueError);
}

INSTANTIATE_TEST_SUITE_P(Bits, Quantized, testing::Values(4, 8));

}  // namespace
}  // namespace deeptide::numerics
