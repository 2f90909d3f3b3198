// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Autocast lasts as long as its scope, and nests.
#include "deeptide/autocast.h"

#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace deeptide {
namespace {

at::ScalarType type_of_product() { return at::matmul(at::ones({4, 4}), at::ones({4, 4})).scalar_type(); }

TEST(Autocast, CastsWithinItsScopeOnly) {
  EXPECT_EQ(type_of_product(), at::kFloat);
  {
    const Autocast outer(at::kCPU, at::kBFloat16);
    EXPECT_EQ(type_of_product(), at::kBFloat16);
    {
      const Autocast inner(at::kCPU, at::kHalf);
      EXPECT_EQ(type_of_product(), at::kHalf);
    }
    EXPECT_EQ(type_of_product(), at::kBFloat16);
  }
  EXPECT_EQ(type_of_product(), at::kFloat);
}

TEST(Autocast, RefusesATypeThatIsNotLower) {
  EXPECT_THROW(Autocast(at::kCPU, at::kFloat), c10::ValueError);
  EXPECT_EQ(type_of_product(), at::kFloat);
}

}  // namespace
}  // namespace deeptide
