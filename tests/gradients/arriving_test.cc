// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Products that are computed where their gradients are summed have the bits of those that are computed first.
#include "gradients/arriving.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <tuple>

namespace deeptide::gradients {
namespace {

using at::Tensor;

constexpr int64_t kOffset = 32, kBehind = 16;  // elements of others before and behind a parameter's in its bucket
constexpr float kOthers = 7.0f;

struct Bucket {
  Bucket(int64_t rows, int64_t columns, at::ScalarType dtype, at::ScalarType of_parameter)
      : flat(at::full({kOffset + rows * columns + kBehind}, kOthers, dtype)) {
    parameter.name = "weight";
    parameter.tensors = {at::empty({rows, columns}, of_parameter)};
    parameter.offset = kOffset;
    parameter.numel = rows * columns;
  }
  Tensor place() const { return parameter.view_of(flat); }
  /// Elements of others are as they were.
  bool leaves_others() const {
    const int64_t end = kOffset + parameter.numel;
    return at::equal(flat.narrow(0, 0, kOffset), at::full({kOffset}, kOthers, flat.options())) &&
           at::equal(flat.narrow(0, end, kBehind), at::full({kBehind}, kOthers, flat.options()));
  }

  Tensor flat;
  sharding::Parameter parameter;
};

/// Factors as backward has them: one lies by columns.
Product factors(int64_t rows, int64_t depth, int64_t columns, at::ScalarType dtype) {
  return {at::randn({depth, rows}).to(dtype).t(), at::randn({depth, columns}).to(dtype)};
}

using Case = std::tuple<int64_t, at::ScalarType, at::ScalarType>;  // depth, types of product and bucket

class Products : public testing::TestWithParam<Case> {};

TEST_P(Products, AreAddedBitForBit) {
  const torch::NoGradGuard no_grad;
  const auto [depth, dtype, of_bucket] = GetParam();
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{64, 48}, {1, 33}, {130, 257}}) {
    Bucket bucket(rows, columns, of_bucket, dtype);
    Tensor expected;
    for (int pass = 0; pass < 3; ++pass) {
      const Product product = factors(rows, depth, columns, dtype);
      const Tensor whole = at::mm(product.left, product.right).to(of_bucket);
      Arriving arriving(product);
      if (pass == 0) {
        arriving.copy_into(bucket.flat, bucket.parameter);
        expected = whole;
      } else {
        arriving.add_into(bucket.flat, bucket.parameter);
        expected = expected + whole;
      }
      EXPECT_TRUE(at::equal(bucket.place(), expected)) << rows << " x " << columns << ", pass " << pass;
      EXPECT_TRUE(bucket.leaves_others());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Products,
                         testing::Combine(testing::Values(1, 5, 256, 700, 6000), testing::Values(at::kFloat),
                                          testing::Values(at::kFloat)));
INSTANTIATE_TEST_SUITE_P(Types, Products,
                         testing::Values(Case{300, at::kBFloat16, at::kBFloat16}, Case{300, at::kBFloat16, at::kFloat},
                                         Case{300, at::kDouble, at::kDouble}, Case{300, at::kHalf, at::kFloat}));

TEST(Arriving, TriesAShapeOnceAndLeavesTheProgramsDrawsAlone) {
  const torch::NoGradGuard no_grad;
  const Product product = factors(40, 24, 56, at::kFloat);
  const Tensor place = at::randn({40, 56});
  torch::manual_seed(5);
  const bool alike = adds_alike(place, product);
  const Tensor after = at::rand({4});
  torch::manual_seed(5);
  EXPECT_TRUE(at::equal(at::rand({4}), after));
  EXPECT_EQ(adds_alike(place, product), alike);
}

TEST(Arriving, TakesNoFactorOfAnUncommonLayoutIntoAProduct) {
  const Tensor place = at::randn({16, 16});
  const Tensor spread = at::randn({16, 32}).slice(1, 0, 32, 2);  // (16, 16), every other column
  EXPECT_FALSE(adds_alike(place, {spread, at::randn({16, 16})}));
  EXPECT_FALSE(adds_alike(place, {at::randn({16, 16}), at::randn({257}).narrow(0, 1, 256).view({16, 16})}))
      << "from no border on";
}

}  // namespace
}  // namespace deeptide::gradients
