// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel of the ordered sum beside the CPU's vector code: the same sums, the same squares within 32 blocks.
#include "numerics/sums/sum_kernel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernel_modes.h"
#include "kernel_places.h"
#include "numerics/kernels/kernel_numbers.h"
#include "numerics/kernels/kernel_tensors.h"
#include "numerics/sums/kernel_pieces.h"
#include "numerics/sums/ordered_sum.h"
#include "numerics/sums/ordered_sum_detail.h"
#include "pieces.h"

using at::Tensor;

namespace deeptide::numerics {
namespace {

constexpr int64_t kSizes[] = {0, 1, 31, 33, 255, 257, 4095, 4096, 4097, 65537, 32 * 4096 + 1, 1100 * 4096 - 3};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// Whether the squares are added in the CPU's order.
bool has_equal_squares(int64_t numel) { return numel <= 32 * kernel::SumArguments::kPiece; }

struct Result {
  Tensor accumulator;
  double squares;
};

class SumKernel : public KernelPlaces {
 protected:
  /// `rows`: views of one storage, which begin where a vector would not.
  static Result run(const Tensor& rows, float scale, bool overwrite, const Tensor& start, double squares_before) {
    const Tensor accumulator = there(start.defined() ? start.clone() : start);
    const Tensor squares = there(at::full({1}, squares_before, at::kDouble));
    const auto list = there(rows).narrow(1, 3, rows.size(1) - 5).unbind(0);
    if (on_gpu()) {
      EXPECT_TRUE(detail::has_sum_kernel(list));
      detail::ordered_sum_kernel(list, scale, overwrite, accumulator, squares);
    } else {
      const Tensor scratch = at::empty({kernel::SumArguments::num_scratch(list[0].numel())}, at::kDouble);
      host_kernels::sum(detail::sum_arguments(list, scale, overwrite, accumulator, scratch, squares), nullptr);
    }
    return {here(accumulator), here(squares).item<double>()};
  }

  static Result expected(const Tensor& rows, float scale, bool overwrite, const Tensor& start, double squares_before) {
    Result result{start.clone(), 0};
    const Tensor squares = at::full({1}, squares_before, at::kDouble);
    const auto list = rows.narrow(1, 3, rows.size(1) - 5).unbind(0);
    detail::ordered_sum_cpu(list, scale, overwrite, result.accumulator, squares);
    result.squares = squares.item<double>();
    return result;
  }

  static void compare(const Tensor& rows, float scale, bool overwrite, const Tensor& start) {
    const double before = overwrite ? 0.0 : 0.125;
    const Result got = run(rows, scale, overwrite, start, before);
    const Result want = expected(rows, scale, overwrite, start, before);
    const int64_t numel = start.numel();
    ASSERT_TRUE(same_numbers(got.accumulator, want.accumulator)) << rows.sizes() << " " << rows.scalar_type();
    // The same non-negative numbers, added in another order.
    const double tolerance = has_equal_squares(numel) ? 0.0 : 1e-13 * want.squares;
    ASSERT_NEAR(got.squares, want.squares, tolerance) << rows.sizes() << " " << rows.scalar_type();
  }
};

TEST_P(SumKernel, EqualsTheCpusVectorsBitForBit) {
  at::manual_seed(1);
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t world : {1, 2, 3, 4, 7, 9, 24}) {
      for (int64_t numel : kSizes) {
        // Many blocks are no matter of rows: one, and more than are unrolled, will do.
        if (numel > (1 << 20) && world != 1 && world != 9) continue;
        const Tensor rows = at::randn({world, numel + 5}).to(dtype), start = at::randn({numel});
        compare(rows, 1.0f / 3, /*overwrite=*/true, start);
        compare(rows, 1.0f, /*overwrite=*/false, start);
      }
    }
  }
}

/// Rows that begin at 16 bytes are taken eight elements at a time, in the same order.
TEST_P(SumKernel, GivesTheSameBitsInAccessesOf16Bytes) {
  at::manual_seed(5);
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t world : {1, 2, 4, 8}) {
      for (int64_t numel : {0, 1, 7, 8, 31, 32, 33, 250, 4095, 4096, 4097, 9001, 65536 + 24}) {
        const Tensor rows = at::randn({world, (numel + 7) / 8 * 8}).to(dtype), start = at::randn({numel});
        std::vector<Tensor> list = there(rows).narrow(1, 0, numel).unbind(0), host = rows.narrow(1, 0, numel).unbind(0);
        for (int mode = 0; mode < 3; ++mode) {  // over, onto, nowhere
          const bool overwrite = mode != 1;
          const Tensor got = mode == 2 ? Tensor() : there(start.clone()), want = start.clone();
          const Tensor got_squares = there(at::full({1}, 0.5, at::kDouble)), squares = at::full({1}, 0.5, at::kDouble);
          if (on_gpu()) {
            detail::ordered_sum_kernel(list, 0.25f, overwrite, got, got_squares);
          } else {
            const Tensor scratch = at::empty({kernel::SumArguments::num_scratch(numel)}, at::kDouble);
            host_kernels::sum(detail::sum_arguments(list, 0.25f, overwrite, got, scratch, got_squares), nullptr);
          }
          detail::ordered_sum_cpu(host, 0.25f, overwrite, want, squares);
          ASSERT_TRUE(mode == 2 || same_numbers(here(got), want)) << dtype << " " << world << " " << numel;
          ASSERT_EQ(here(got_squares).item<double>(), squares.item<double>()) << dtype << " " << world << " " << numel;
        }
      }
    }
  }
}

/// A gradient's pieces have the squares, bit for bit, of the bucket that they would make.
TEST_P(SumKernel, TakesPiecesAsTheRowThatTheyAreOf) {
  at::manual_seed(6);
  const std::vector<std::vector<int64_t>> cases = {
      {1}, {8}, {4096, 1, 33, 4095}, {100'000, 7}, {5, 9000, 31, 32, 77'777}, std::vector<int64_t>(64, 130)};
  for (at::ScalarType dtype : kDtypes) {
    for (const auto& lengths : cases) {
      for (int64_t before : {0, 96, 8192}) {
        const Contributions own = random_pieces(lengths, dtype, 0.3, GetParam(), before);
        ASSERT_TRUE(fit_kernels(own));
        const Tensor got = there(at::full({1}, 0.5, at::kDouble)), want = at::full({1}, 0.5, at::kDouble);
        if (on_gpu()) {
          detail::ordered_squares_kernel(own, got);
        } else {
          const Tensor scratch = at::empty({kernel::SumArguments::num_scratch(own.numel)}, at::kDouble);
          kernel::SumArguments arguments{.rows = {}, .pieces = pieces_of(own), .accumulator = {}, .count = own.numel};
          arguments.scratch = scratch.mutable_data_ptr<double>();
          arguments.sum_of_squares = got.mutable_data_ptr<double>();
          host_kernels::sum(arguments, nullptr);
        }
        const Tensor row = here(own.joined().rows[0]);
        detail::ordered_squares_cpu({row}, 0.3f, want);
        const double tolerance = has_equal_squares(own.numel) ? 0.0 : 1e-13 * want.item<double>();
        ASSERT_NEAR(here(got).item<double>(), want.item<double>(), tolerance) << dtype << " " << lengths.size();
      }
    }
  }
}

TEST_P(SumKernel, RoundsOnceIntoAnAccumulatorOf16Bits) {
  at::manual_seed(2);
  for (at::ScalarType sums : {at::kBFloat16, at::kHalf}) {
    for (int64_t numel : {int64_t{1}, int64_t{4097}, int64_t{65537}}) {
      const Tensor rows = at::randn({3, numel + 5}).to(sums), start = at::randn({numel}).to(sums);
      compare(rows, 1.0f / 3, /*overwrite=*/true, start);
      compare(rows, 1.0f / 3, /*overwrite=*/false, start);
    }
  }
}

TEST_P(SumKernel, TakesAsManyRanksAsItsArgumentsHold) {
  at::manual_seed(3);
  compare(at::randn({kernel::Rows::kMost, 4101}), 0.5f, /*overwrite=*/true, at::zeros({4096}));
}

TEST_P(SumKernel, HasSquaresThatAreNotFiniteIfAnElementIsNot) {
  for (float bad : {kNaN, kInf, -kInf}) {
    for (int64_t place : {int64_t{0}, int64_t{4095}, int64_t{4096}, int64_t{5000}}) {
      Tensor rows = at::randn({2, 5006});
      rows[1][3 + place] = bad;
      const Result got = run(rows, 1.0f, /*overwrite=*/true, at::zeros({5001}), 0.0);
      EXPECT_FALSE(std::isfinite(got.squares)) << bad << " at " << place;
      EXPECT_TRUE(same_numbers(got.accumulator, rows.narrow(1, 3, 5001).sum(0))) << bad << " at " << place;
    }
  }
}

TEST_P(SumKernel, KeepsTheSquaresOfLargeFiniteSumsFinite) {
  const Tensor rows = at::full({2, 105}, 1e38f);
  const Result got = run(rows, 1.0f, /*overwrite=*/true, at::zeros({100}), 0.0);
  EXPECT_DOUBLE_EQ(got.squares, expected(rows, 1.0f, true, at::zeros({100}), 0.0).squares);
  EXPECT_TRUE(std::isfinite(got.squares));
}

TEST_P(SumKernel, LeavesSumsAloneWhereOnlySquaresAreWanted) {
  at::manual_seed(4);
  for (int64_t numel : {int64_t{0}, int64_t{1}, int64_t{4097}}) {
    const Tensor rows = at::randn({2, numel + 5}).to(at::kBFloat16);
    const double got = run(rows, 0.25f, /*overwrite=*/true, at::Tensor(), 1.0).squares;
    EXPECT_EQ(got, expected(rows, 0.25f, /*overwrite=*/true, at::zeros({numel}), 1.0).squares) << numel;
  }
}

DEEPTIDE_AT_KERNEL_PLACES(SumKernel);

TEST(KernelNumbers, RoundFp16AsTorchDoes) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = static_cast<float>(c10::Half(static_cast<uint16_t>(half), c10::Half::from_bits()));
    const float got = kernel::from_fp16(half);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(got) && std::isnan(kernel::from_fp16(kernel::to_fp16(got)))) << half;
      continue;
    }
    ASSERT_EQ(kernel::bits_of(got), kernel::bits_of(value)) << half;
    // The number, the next ones, and halfway to the next.
    for (uint32_t more : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u}) {
      const float x = kernel::float_of(kernel::bits_of(value) + more);
      ASSERT_TRUE(std::isnan(x) || kernel::to_fp16(x) == c10::Half(x).x) << half << " + " << more;
    }
  }
  for (float x : {65519.99f, 65520.0f, 1e30f, kInf, 1e-45f, 2.9802322e-8f, 2.98023224e-8f, 3e-8f, 6.1e-5f}) {
    EXPECT_EQ(kernel::to_fp16(x), c10::Half(x).x) << x;
    EXPECT_EQ(kernel::to_fp16(-x), c10::Half(-x).x) << x;
  }
}

TEST(KernelNumbers, RoundBf16AsTorchDoes) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const float x = kernel::float_of(high << 16 | low);
      ASSERT_TRUE(std::isnan(x) || kernel::to_bf16(x) == c10::BFloat16(x).x) << x;
    }
  }
  EXPECT_EQ(kernel::to_bf16(kNaN), 0x7FC0);
  EXPECT_EQ(kernel::to_bf16(-kernel::float_of(0x7F800001)), 0x7FC0);
}

}  // namespace
}  // namespace deeptide::numerics
