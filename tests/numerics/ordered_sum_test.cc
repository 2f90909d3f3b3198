// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ordered sum: its order, its bits under any number of threads and instruction set, its norm and its culprits.
#include "numerics/sums/ordered_sum.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_modes.h"
#include "numerics/sums/ordered_sum_detail.h"

using at::Tensor;

namespace deeptide::numerics {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4095, 4096, 4097, 65537};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// (world, numel) with rows at an odd distance and an odd start.
Tensor ragged_rows(int64_t world, int64_t numel, at::ScalarType dtype) {
  return at::randn({world, numel + 5}).to(dtype).narrow(1, 3, numel);
}

struct Result {
  Tensor accumulator;
  double sum_of_squares;
};

Result run(const Tensor& contributions, double scale, bool overwrite, const Tensor& start) {
  Result result{start.clone(), 0};
  Tensor squares = at::full({1}, -1.0, at::kDouble);
  ordered_sum(contributions.unbind(0), scale, overwrite, result.accumulator, squares);
  result.sum_of_squares = squares.item<double>();
  return result;
}

/// In fp32: neighbours first.
Tensor sum_by_pairs(std::vector<Tensor> rows) {
  while (rows.size() > 1) {
    std::vector<Tensor> sums;
    for (size_t i = 0; i + 1 < rows.size(); i += 2) sums.push_back(rows[i].to(at::kFloat) + rows[i + 1].to(at::kFloat));
    if (rows.size() % 2 == 1) sums.push_back(rows.back());
    rows = std::move(sums);
  }
  return rows[0].to(at::kFloat);
}

TEST(OrderedSum, EqualsTheSumByPairsBitForBit) {
  at::manual_seed(1);
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t world : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 23, 40}) {
      for (int64_t numel : kSizes) {
        for (bool overwrite : {true, false}) {
          const Tensor rows = ragged_rows(world, numel, dtype), start = at::randn({numel});
          const Tensor sum = sum_by_pairs(rows.unbind(0));
          const Tensor expected = overwrite ? sum * (1.0f / 3) : start + sum * (1.0f / 3);
          const Result got = run(rows, 1.0f / 3, overwrite, start);
          ASSERT_TRUE(at::equal(got.accumulator, expected)) << dtype << " " << world << "x" << numel;
          const double squares = expected.to(at::kDouble).square().sum().item<double>();
          ASSERT_NEAR(got.sum_of_squares, squares, 1e-13 * squares) << dtype << " " << world << "x" << numel;
        }
      }
    }
  }
}

TEST(OrderedSum, IsRoundedOnceIntoAnAccumulatorOf16Bits) {
  at::manual_seed(8);
  for (at::ScalarType sums : {at::kBFloat16, at::kHalf}) {
    for (at::ScalarType dtype : {at::kFloat, sums}) {
      for (int64_t world : {1, 2, 9}) {
        for (int64_t numel : kSizes) {
          for (bool overwrite : {true, false}) {
            const Tensor rows = ragged_rows(world, numel, dtype), start = at::randn({numel}).to(sums);
            const Tensor sum = sum_by_pairs(rows.unbind(0));
            const Tensor expected = (overwrite ? sum * 0.3f : start.to(at::kFloat) + sum * 0.3f).to(sums);
            const Result got = run(rows, 0.3f, overwrite, start);
            ASSERT_TRUE(at::equal(got.accumulator, expected))
                << sums << " of " << dtype << " " << world << "x" << numel;
            const Result of_stored = run(expected.unsqueeze(0), 1.0, true, at::zeros({numel}));
            ASSERT_EQ(got.sum_of_squares, of_stored.sum_of_squares) << "squares are of what is stored";
            Tensor oracle = start.clone(), squares = at::zeros({1}, at::kDouble);
            detail::ordered_sum_reference(rows.unbind(0), 0.3f, overwrite, oracle, squares);
            ASSERT_TRUE(at::equal(oracle, expected));
          }
        }
      }
    }
  }
}

TEST(OrderedSum, OfFiniteRowsThatOverflowsFp16IsNamedWithoutARank) {
  const Tensor rows = at::full({2, 5}, 4e4f).to(at::kHalf);
  const Result got = run(rows, 1.0, true, at::zeros({5}, at::kHalf));
  EXPECT_TRUE(std::isinf(got.sum_of_squares));
  const auto found = find_non_finite(rows.unbind(0), got.accumulator);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->rank, -1);
}

TEST(OrderedSum, TakesNeighboursFirst) {
  // In fp32 (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1; 1 + (1e8 - 1e8) is 1, (1 + 1e8) - 1e8 is 0.
  const Tensor four = at::tensor({0.0f, 1.0f, 1e8f, -1e8f}).unsqueeze(1);
  EXPECT_EQ(run(four, 1.0, true, at::zeros({1})).accumulator.item<float>(), 1.0f);
  const Tensor rows = at::tensor({1e8f, 1.0f, -1e8f}).unsqueeze(1);
  EXPECT_EQ(run(rows, 1.0, true, at::zeros({1})).accumulator.item<float>(), 0.0f);
  const Tensor other = at::tensor({1e8f, -1e8f, 1.0f}).unsqueeze(1);
  EXPECT_EQ(run(other, 1.0, true, at::zeros({1})).accumulator.item<float>(), 1.0f);
}

TEST(OrderedSum, OfSumsOfAlignedNeighboursIsTheSumOfAll) {
  at::manual_seed(12);
  constexpr int64_t kNumel = 4099;
  for (int64_t world : {4, 6, 8, 12, 24}) {
    for (int64_t together : {2, 4}) {
      const Tensor rows = ragged_rows(world, kNumel, at::kBFloat16);
      std::vector<Tensor> sums;
      for (int64_t first = 0; first < world; first += together) {
        const auto some = rows.narrow(0, first, std::min(together, world - first)).unbind(0);
        sums.push_back(Contributions(some, 1.0).sum());
      }
      EXPECT_TRUE(at::equal(Contributions(sums, 0.3).sum(), Contributions(rows.unbind(0), 0.3).sum()))
          << world << " ranks, " << together << " together";
    }
  }
}

TEST(OrderedSum, WritesLargeSumsPastTheCacheAsItWritesSmallOnes) {
  at::manual_seed(6);
  constexpr int64_t kNumel = (1 << 20) + 4099;
  const Tensor rows = ragged_rows(2, kNumel, at::kBFloat16);
  const Tensor expected = (rows[0].to(at::kFloat) + rows[1].to(at::kFloat)) * 0.5f;
  for (int64_t offset : {0, 1}) {  // what is not aligned goes through the cache
    const Tensor sum = at::zeros({kNumel + 1}).narrow(0, offset, kNumel), squares = at::zeros({1}, at::kDouble);
    ordered_sum(rows.unbind(0), 0.5, /*overwrite=*/true, sum, squares);
    EXPECT_TRUE(at::equal(sum, expected));
    EXPECT_EQ(squares.item<double>(), run(rows, 0.5, false, at::zeros({kNumel})).sum_of_squares);
  }
}

TEST(OrderedSum, InPartsGivesTheBitsOfTheWhole) {
  at::manual_seed(9);
  constexpr int64_t kPart = 3 * SumReader::kBlock, kNumel = 4 * kPart + 1001;
  for (at::ScalarType sums : {at::kFloat, at::kBFloat16}) {
    const Tensor rows = ragged_rows(2, kNumel, at::kBFloat16), start = at::randn({kNumel}).to(sums);
    const Result whole = run(rows, 0.3, false, start);
    Tensor sum = start.clone(), squares = at::full({1}, -1.0, at::kDouble);
    Tensor of_sum = at::full({1}, -1.0, at::kDouble);
    for (int64_t begin = 0; begin < kNumel; begin += kPart) {
      const int64_t length = std::min(kPart, kNumel - begin);
      const Contributions part = Contributions(rows.unbind(0), 0.3).narrow(begin, length);
      const auto how = begin == 0 ? Squares::begin : Squares::go_on;
      ordered_sum(part.rows, part.scale, /*overwrite=*/false, sum.narrow(0, begin, length), squares, how);
      ordered_squares(sum.narrow(0, begin, length), of_sum, how);
    }
    EXPECT_TRUE(at::equal(sum, whole.accumulator));
    EXPECT_EQ(squares.item<double>(), whole.sum_of_squares);
    EXPECT_EQ(of_sum.item<double>(), whole.sum_of_squares);
  }
}

TEST(OrderedSum, IsBitEqualForOneAndTwoThreads) {
  at::manual_seed(2);
  for (int64_t numel : {32768, 32769, 300007}) {
    const Tensor rows = ragged_rows(3, numel, at::kBFloat16), start = at::randn({numel});
    Result one, two;
    {
      Threads threads(1);
      one = run(rows, 0.5, false, start);
    }
    {
      Threads threads(2);
      two = run(rows, 0.5, false, start);
    }
    EXPECT_TRUE(at::equal(one.accumulator, two.accumulator));
    EXPECT_EQ(one.sum_of_squares, two.sum_of_squares);
  }
}

TEST(OrderedSum, IsBitEqualOnEveryInstructionSetOfThisMachine) {
  at::manual_seed(3);
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t numel : {33, 1003, 9001}) {
      const Tensor rows = ragged_rows(5, numel, dtype), start = at::randn({numel});
      const Result expected = run(rows, 0.7, false, start);
      for (int64_t target : {int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}, int64_t{HWY_AVX3}}) {
        if (target != HWY_SCALAR && !(hwy::SupportedTargets() & target)) continue;
        Target chosen(target);
        if (target != HWY_SCALAR) {
          EXPECT_STREQ(kernel_target(), hwy::TargetName(target));
        }
        const Result got = run(rows, 0.7, false, start);
        EXPECT_TRUE(at::equal(got.accumulator, expected.accumulator)) << hwy::TargetName(target);
        EXPECT_EQ(got.sum_of_squares, expected.sum_of_squares) << hwy::TargetName(target);
      }
    }
  }
}

TEST(OrderedSum, AgreesWithTheOracleOfOtherDevices) {
  at::manual_seed(4);
  for (at::ScalarType dtype : kDtypes) {
    for (bool overwrite : {true, false}) {
      const Tensor rows = ragged_rows(3, 5001, dtype), start = at::randn({5001});
      Tensor accumulator = start.clone(), squares = at::zeros({1}, at::kDouble);
      detail::ordered_sum_reference(rows.unbind(0), 0.3f, overwrite, accumulator, squares);
      const Result got = run(rows, 0.3f, overwrite, start);
      EXPECT_TRUE(at::equal(got.accumulator, accumulator));
      EXPECT_NEAR(got.sum_of_squares, squares.item<double>(), 1e-12 * got.sum_of_squares);
    }
  }
}

TEST(OrderedSum, LeavesNeighboursAlone) {
  for (int64_t numel : kSizes) {
    Tensor storage = at::zeros({numel + 4}), squares = at::zeros({1}, at::kDouble);
    ordered_sum(at::ones({2, numel}).unbind(0), 1.0, true, storage.narrow(0, 1, numel), squares);
    EXPECT_EQ(storage.sum().item<double>(), 2.0 * static_cast<double>(numel));
    EXPECT_EQ(squares.item<double>(), 4.0 * static_cast<double>(numel));
    EXPECT_EQ(storage[0].item<float>(), 0.0f);
    EXPECT_EQ(storage.narrow(0, numel + 1, 3).abs().sum().item<float>(), 0.0f);
  }
}

TEST(OrderedSum, SquaresLargeFiniteValuesWithoutOverflow) {
  const double expected = 3e38f * static_cast<double>(3e38f) * 100;
  EXPECT_NEAR(run(at::full({1, 100}, 3e38f), 1.0, true, at::zeros({100})).sum_of_squares, expected, 1e-12 * expected);
}

TEST(OrderedSum, NamesTheFirstBadElementAndRankWhereverItLies) {
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t index : {0, 15, 31, 4095, 4096, 9000}) {
      for (float bad : {kNaN, kInf, -kInf}) {
        Tensor rows = at::ones({3, 9001}, dtype);
        rows[2][index] = bad;
        rows[1][index] = bad;
        rows[0][9000] = bad;
        const Result got = run(rows, 1.0, true, at::zeros({9001}));
        ASSERT_FALSE(std::isfinite(got.sum_of_squares)) << index;
        const auto found = find_non_finite(rows.unbind(0), got.accumulator);
        ASSERT_TRUE(found.has_value());
        EXPECT_EQ(found->index, index);
        EXPECT_EQ(found->rank, index == 9000 ? 0 : 1);
      }
    }
  }
}

TEST(OrderedSum, SaysThatOnlyTheSumOverflowed) {
  const Tensor rows = at::full({2, 5}, 3e38f);
  const Result got = run(rows, 1.0, true, at::zeros({5}));
  EXPECT_TRUE(std::isinf(got.sum_of_squares));
  const auto found = find_non_finite(rows.unbind(0), got.accumulator);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->index, 0);
  EXPECT_EQ(found->rank, -1);
}

TEST(FindNonFinite, FindsNothingInFiniteValues) {
  EXPECT_FALSE(find_non_finite(at::ones({2, 9}).unbind(0), at::ones({9})).has_value());
  EXPECT_FALSE(find_non_finite(at::ones({2, 0}).unbind(0), at::ones({0})).has_value());
}

TEST(Accumulate, AddsOrOverwritesWithCast) {
  at::manual_seed(5);
  for (at::ScalarType from : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (at::ScalarType to : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (int64_t numel : kSizes) {
        const Tensor gradient = at::randn({numel + 3}).to(from).narrow(0, 1, numel);
        const Tensor start = at::randn({numel}).to(to);
        Tensor added = start.clone(), written = start.clone();
        accumulate(gradient, false, added);
        accumulate(gradient, true, written);
        ASSERT_TRUE(at::equal(added, (start + gradient).to(to))) << from << " into " << to << ", " << numel;
        ASSERT_TRUE(at::equal(written, gradient.to(to))) << from << " into " << to << ", " << numel;
      }
    }
  }
}

TEST(Accumulate, TakesAStridedGradient) {
  const Tensor gradient = at::randn({10, 3}).to(at::kBFloat16).select(1, 1);
  Tensor accumulator = at::ones({10});
  accumulate(gradient, false, accumulator);
  EXPECT_TRUE(at::equal(accumulator, gradient.to(at::kFloat) + 1));
}

TEST(OrderedSum, RejectsTensorsThatDoNotFit) {
  const auto rejects = [](const Tensor& rows, const Tensor& accumulator, const Tensor& squares,
                          const std::string& word) {
    try {
      ordered_sum(rows.defined() ? rows.unbind(0) : std::vector<Tensor>{rows}, 1.0, true, accumulator, squares);
      ADD_FAILURE() << "accepted; expected an error about " << word;
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  const Tensor rows = at::ones({2, 4}), sums = at::zeros({4}), squares = at::zeros({1}, at::kDouble);
  const Tensor elsewhere = at::empty({4}, at::TensorOptions(at::kMeta));
  rejects(at::ones({2, 5}), sums, squares, "a row has shape [5], expected (4,)");
  rejects(at::ones({4}), sums, squares, "a row has shape []");
  rejects(at::ones({0, 4}), sums, squares, "there are no rows");
  rejects(Tensor(), sums, squares, "a row has shape");
  rejects(at::ones({4, 2}).t(), sums, squares, "each row must be contiguous");
  rejects(rows.to(at::kDouble), sums, squares, "a row is Double");
  rejects(rows, sums.to(at::kDouble), squares, "accumulator is Double");
  rejects(rows, at::zeros({8}).slice(0, 0, 8, 2), squares, "accumulator must be");
  rejects(rows, elsewhere, squares, "a row is on cpu");
  rejects(rows, sums, squares.to(at::kFloat), "sum_of_squares");
  rejects(rows, sums, at::zeros({2}, at::kDouble), "sum_of_squares");
}

TEST(Accumulate, RejectsTensorsThatDoNotFit) {
  EXPECT_THROW(accumulate(at::ones({3}), false, at::ones({4})), c10::ValueError);
  EXPECT_THROW(accumulate(at::ones({3}, at::kInt), false, at::ones({3})), c10::ValueError);
  EXPECT_THROW(accumulate(at::ones({3}), false, at::empty({3}, at::TensorOptions(at::kMeta))), c10::ValueError);
  EXPECT_THROW(accumulate(Tensor(), false, at::ones({3})), c10::ValueError);
}

}  // namespace
}  // namespace deeptide::numerics
