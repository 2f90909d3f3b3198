// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packed signs equal those of ATen operators bit for bit, at every length and alignment.
#include "numerics/rounding/sign_bits.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <gtest/gtest.h>

namespace deeptide::numerics {
namespace {

using at::Tensor;

constexpr int64_t kSignCounts[] = {0, 1, 7, 8, 9, 15, 16, 63, 64, 65, 200, 4096, 4097, 70'001, 300'000};

Tensor signs_of(const Tensor& values) { return at::where(values.ge(0), at::full({1}, 1.0f), at::full({1}, -1.0f)); }

/// A view that begins off a vector's alignment.
Tensor shifted_values(int64_t count) { return at::randn({count + 3}).narrow(0, 3, count); }

TEST(SignBits, SplitValuesIntoSignsAndWhatIsLeft) {
  at::manual_seed(1);
  for (const int64_t count : kSignCounts) {
    const Tensor values = shifted_values(count), scale = at::full({1}, 0.75f);
    if (count > 2) values.narrow(0, 1, 1).zero_();
    const Tensor given = values.clone(), plain = values.clone();
    const Tensor bits = at::full({sign_bytes(count) + 1}, 0xAA, at::kByte), plain_bits = bits.clone();
    split_signs(values, scale, bits.narrow(0, 0, sign_bytes(count)));
    reference::split_signs(plain, scale, plain_bits.narrow(0, 0, sign_bytes(count)));
    ASSERT_TRUE(at::equal(bits, plain_bits)) << count;  // the byte behind them stays
    ASSERT_TRUE(at::equal(values, plain)) << count;
    ASSERT_TRUE(at::equal(values, given - signs_of(given) * 0.75f)) << count;
  }
}

TEST(SignBits, GiveTheSignsBack) {
  at::manual_seed(2);
  for (const int64_t count : kSignCounts) {
    const Tensor values = shifted_values(count), signs = signs_of(values), scale = at::full({1}, 0.3f);
    const Tensor bits = at::full({sign_bytes(count)}, 0, at::kByte), sums = shifted_values(count);
    split_signs(values.clone(), scale, bits);
    const Tensor expected = sums + signs * 0.3f, plain = sums.clone(), out = values.clone();
    set_signs(bits, scale, out);
    ASSERT_TRUE(at::equal(out, signs * 0.3f)) << count;
    add_signs(bits, scale, sums);
    ASSERT_TRUE(at::equal(sums, expected)) << count;
    reference::add_signs(bits, scale, plain);
    ASSERT_TRUE(at::equal(plain, expected)) << count;
    reference::set_signs(bits, scale, out.zero_());
    ASSERT_TRUE(at::equal(out, signs * 0.3f)) << count;
  }
}

TEST(SignBits, AreRefusedIfTheirLengthDoesNotFit) {
  const Tensor values = at::randn({9}), scale = at::full({1}, 1.0f);
  EXPECT_THROW(split_signs(values, scale, at::full({1}, 0, at::kByte)), c10::ValueError);
  EXPECT_THROW(split_signs(values, at::full({2}, 1.0f), at::full({2}, 0, at::kByte)), c10::ValueError);
  EXPECT_THROW(add_signs(at::full({2}, 0, at::kByte), scale, values.to(at::kDouble)), c10::ValueError);
}

}  // namespace
}  // namespace deeptide::numerics
