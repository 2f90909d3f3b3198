// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A sum of squares is exact to fp64's roundings, and does not depend on cuts or instruction sets.
#include "numerics/sums/piece_squares.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <limits>
#include <random>

#include "kernel_modes.h"

namespace deeptide::numerics {
namespace {

constexpr int64_t kRangeSizes[] = {0, 1, 15, 16, 17, 1000, PieceSquares::kBlock, PieceSquares::kBlock + 1, 100'003};

double squares_of(const at::Tensor& values) {
  PieceSquares squares(values.numel());
  squares.add(0, values);
  return squares.total();
}

TEST(PieceSquares, AgreesWithTheSumInDoubles) {
  at::manual_seed(1);
  for (const int64_t numel : kRangeSizes) {
    const at::Tensor values = at::randn({numel});
    const double expected = values.to(at::kDouble).square().sum().item<double>();
    // Both add N exact squares in fp64, in different orders.
    EXPECT_NEAR(squares_of(values), expected, 1e-13 * static_cast<double>(numel)) << numel;
  }
}

TEST(PieceSquares, IsBitEqualHoweverItIsCut) {
  at::manual_seed(2);
  std::mt19937 random(3);
  for (const int64_t numel : kRangeSizes) {
    const at::Tensor values = at::randn({numel});
    for (const int64_t longest : {3, 40, 5000, 60'000}) {
      PieceSquares squares(numel);
      for (int64_t begin = 0, length; begin < numel; begin += length) {
        length = std::min(numel - begin, std::uniform_int_distribution<int64_t>(1, longest)(random));
        squares.add(begin, values.narrow(0, begin, length));
      }
      EXPECT_EQ(squares.total(), squares_of(values)) << numel << " in pieces of at most " << longest;
    }
  }
}

TEST(PieceSquares, IsBitEqualOnEveryInstructionSetOfThisMachine) {
  at::manual_seed(4);
  const at::Tensor values = at::randn({100'003}) * 1e3;
  const double expected = squares_of(values);
  for (const int64_t target : {int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}, int64_t{HWY_AVX3}}) {
    if (target != HWY_SCALAR && !(hwy::SupportedTargets() & target)) continue;
    const Target chosen(target);
    EXPECT_EQ(squares_of(values), expected) << hwy::TargetName(target);
  }
}

TEST(PieceSquares, KeepsWhatOverflowsFloat) {
  const float large = std::numeric_limits<float>::max();
  const at::Tensor values = at::full({100}, large);
  EXPECT_DOUBLE_EQ(squares_of(values), 100.0 * static_cast<double>(large) * static_cast<double>(large));
}

}  // namespace
}  // namespace deeptide::numerics
