// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The macros of the version agree with each other and with the library.
#include "deeptide/version.h"

#include <gtest/gtest.h>

#include <string>

namespace deeptide {

TEST(Version, OfTheLibraryIsThatOfTheHeaders) { EXPECT_STREQ(version(), DEEPTIDE_VERSION); }

TEST(Version, NumbersMakeTheText) {
  const auto number = [](int value) { return std::to_string(value); };
  EXPECT_EQ(
      number(DEEPTIDE_VERSION_MAJOR) + "." + number(DEEPTIDE_VERSION_MINOR) + "." + number(DEEPTIDE_VERSION_PATCH),
      DEEPTIDE_VERSION);
}

}  // namespace deeptide
