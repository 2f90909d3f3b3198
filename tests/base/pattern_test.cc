// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Regular expressions: where they match, and what they refuse.
#include "base/libraries/pattern.h"

#include <gtest/gtest.h>

#include <string>

namespace deeptide {
namespace {

TEST(Pattern, IsFoundAnywhere) {
  const Pattern pattern("attention\\.(q|k)_proj$");
  EXPECT_TRUE(pattern.is_in("layers.3.attention.q_proj"));
  EXPECT_FALSE(pattern.is_in("layers.3.attention.v_proj"));
  EXPECT_FALSE(pattern.is_in("layers.3.attention.q_proj.weight"));
}

TEST(Pattern, BeginsAName) {
  const Pattern pattern("layers\\.\\d+");
  EXPECT_TRUE(pattern.begins("layers.12.weight"));
  EXPECT_FALSE(pattern.begins("model.layers.12.weight"));
}

TEST(Pattern, TakesNoExponentialTime) {
  EXPECT_FALSE(Pattern("(a+)+b").is_in(std::string(200, 'a')));  // 2^200 ways to try for one that goes back
}

TEST(Pattern, RefusesWhatIsNone) {
  EXPECT_THROW(Pattern("("), PatternError);
  EXPECT_THROW(Pattern("(a)\\1"), PatternError);  // a back reference
}

}  // namespace
}  // namespace deeptide
