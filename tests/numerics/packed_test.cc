// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A packed number comes back bit for bit, and its upper half is torch's bf16: for every bf16 number and all that is
// hard.
#include "numerics/rounding/packed.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_modes.h"

namespace deeptide::numerics {
namespace {

using at::Tensor;

/// Memory for packed numbers, with some more on both sides.
struct Packed {
  explicit Packed(int64_t numel, int64_t offset = 0)
      : high(at::full({numel + offset + 3}, 7, at::kShort)), low(high.clone()), halfway(numel), offset(offset) {}

  PackedRange range() {
    return {static_cast<uint16_t*>(high.mutable_data_ptr()) + offset,
            static_cast<uint16_t*>(low.mutable_data_ptr()) + offset, &halfway, 0};
  }
  std::vector<float> unpacked(size_t count) {
    std::vector<float> values(count);
    unpack(range(), static_cast<int64_t>(count), values.data());
    return values;
  }

  Tensor high, low;
  HalfwayBits halfway;
  int64_t offset;
};

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

void expect_same(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << std::hex << bits_of(expected[i]);
    } else {
      ASSERT_EQ(bits_of(got[i]), bits_of(expected[i])) << i << ": " << std::hex << bits_of(expected[i]);
    }
  }
}

/// Every upper half with lower halves below, at and above a tie, and at their ends: zeros, denormals, infinities, NaNs,
/// and the largest finite numbers, which round to infinity, are among them.
std::vector<float> hard_values() {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, 0x1234u, 0xEDCBu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  return values;
}

TEST(Packed, GivesBackEveryNumberAndRoundsItsUpperHalfAsTorchDoes) {
  const std::vector<float> values = hard_values();
  const auto count = static_cast<int64_t>(values.size());
  const Tensor plain = at::from_blob(const_cast<float*>(values.data()), {count}, at::kFloat);
  for (const int64_t target : {int64_t{0}, int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}}) {
    if (target != 0 && target != HWY_SCALAR && !(hwy::SupportedTargets() & target)) continue;
    const Target chosen(target);
    Packed packed(count);
    pack(values.data(), count, packed.range());
    const Tensor bf16 = plain.to(at::kBFloat16), high = packed.high.narrow(0, 0, count);
    const Tensor differs = high.ne(bf16.view(at::kShort));
    ASSERT_FALSE((differs & ~bf16.isnan()).any().item<bool>()) << target;
    ASSERT_TRUE(high.view(at::kBFloat16).isnan().equal(plain.isnan())) << target;
    expect_same(packed.unpacked(values.size()), values);
  }
}

TEST(Packed, IsTheSameAtAnyLengthAndAlignmentAndLeavesNeighboursAlone) {
  at::manual_seed(1);
  for (const int64_t count : {0, 1, 7, 15, 16, 17, 63, 64, 65, 1003}) {
    // Lower halves at a tie, as often as not.
    const Tensor bits =
        at::randint(0x3F00, 0x4100, {count}, at::kInt) * 0x10000 + at::randint(0, 2, {count}, at::kInt) * 0x8000;
    const Tensor values = bits.view(at::kFloat);
    const std::vector<float> expected(values.const_data_ptr<float>(), values.const_data_ptr<float>() + count);
    for (const int64_t offset : {0, 1, 3, 13}) {
      Packed packed(count, offset);
      pack(expected.data(), count, packed.range());
      expect_same(packed.unpacked(expected.size()), expected);
      for (const Tensor& memory : {packed.high, packed.low}) {
        ASSERT_TRUE(memory.narrow(0, 0, offset).eq(7).all().item<bool>());
        ASSERT_TRUE(memory.narrow(0, offset + count, 3).eq(7).all().item<bool>());
      }
    }
  }
}

/// An element lies above its bf16 number, then below, then above another: the last counts.
TEST(Packed, FollowsNumbersThatMoveFromOneHalfwayPlaceToAnother) {
  Packed packed(5000);
  const float above = std::bit_cast<float>(0x3F808000u), below = std::bit_cast<float>(0x3F818000u);
  const float next = std::bit_cast<float>(0x3F828000u), plain = 1.25f;
  std::vector<float> values(5000, plain);
  for (const float value : {above, below, above, plain, below, next, plain}) {
    values[4999] = values[17] = value;
    pack(values.data(), 5000, packed.range());
    expect_same(packed.unpacked(values.size()), values);
    if (value != plain) {
      EXPECT_EQ(packed.halfway.is_above(17), value != below);
    }
  }
}

TEST(Packed, CountsElementsFromTheRangesPlace) {
  Packed packed(100);
  const float above = std::bit_cast<float>(0x3F808000u);
  pack(&above, 1, packed.range().from(63));
  EXPECT_TRUE(packed.halfway.is_above(63));
  EXPECT_FALSE(packed.halfway.is_above(0));
  float got = 0.0f;
  unpack(packed.range().from(63), 1, &got);
  EXPECT_EQ(got, above);
}

/// `skipped`: elements before the first that is packed, which share bytes of the bits with it.
struct InTensors {
  InTensors(int64_t numel, int64_t skipped)
      : halfway(at::zeros({(skipped + numel + 3 + 7) / 8}, at::kByte)),
        packed{at::zeros({numel}, at::kBFloat16), at::zeros({numel}, at::kShort), &halfway, skipped} {}

  HalfwayBits halfway;
  PackedTensors packed;
};

TEST(Packed, HasTheSameBitsInOperatorsOfTorch) {
  const std::vector<float> values = hard_values();
  const auto count = static_cast<int64_t>(values.size());
  const Tensor plain = at::from_blob(const_cast<float*>(values.data()), {count}, at::kFloat);
  Packed expected(count);
  pack(values.data(), count, expected.range());
  for (const int64_t skipped : {0, 5, 8}) {
    InTensors got(count, skipped);
    pack(plain, got.packed);
    const Tensor number = plain.isnan().logical_not();
    const Tensor differs = got.packed.high.view(at::kShort).ne(expected.high.narrow(0, 0, count));
    ASSERT_FALSE((differs & number).any().item<bool>());
    ASSERT_TRUE(at::equal(got.packed.low, expected.low.narrow(0, 0, count)));
    std::vector<float> back(values.size());
    unpack(got.packed, at::from_blob(back.data(), {count}, at::kFloat));
    expect_same(back, values);
  }
}

TEST(Packed, KeepsTheBitsBesideARangeOfATensor) {
  InTensors got(20, 3);
  const Tensor above = at::full({20}, std::bit_cast<float>(0x3F808000u)), plain = at::full({20}, 1.25f);
  const auto part = [&](int64_t begin, int64_t count) {
    return PackedTensors{got.packed.high.narrow(0, begin, count), got.packed.low.narrow(0, begin, count), &got.halfway,
                         3 + begin};
  };
  pack(above, got.packed);
  pack(plain.narrow(0, 0, 7), part(6, 7));
  const Tensor expected = above.clone(), back = at::empty({20});
  expected.narrow(0, 6, 7).fill_(1.25f);
  unpack(got.packed, back);
  EXPECT_TRUE(at::equal(back, expected));
  unpack(part(13, 1), back.narrow(0, 0, 1));
  EXPECT_TRUE(at::equal(back[0], above[0]));
}

}  // namespace
}  // namespace deeptide::numerics
