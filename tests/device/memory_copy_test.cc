// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A copy past the cache is a copy: of any length, from and to anywhere.
#include "device/memory_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace deeptide::device {
namespace {

TEST(CopyPastCache, CopiesTheseBytesAndNoOthers) {
  constexpr size_t kBytes = 600, kFence = 64;
  std::vector<uint8_t> source(kBytes + kFence);
  std::iota(source.begin(), source.end(), uint8_t{1});
  for (size_t from = 0; from < 20; from += 19) {
    for (size_t to = 0; to < kFence; ++to) {
      for (const size_t bytes : {0, 1, 15, 63, 64, 65, 127, 200, 512}) {
        std::vector<uint8_t> copy(to + bytes + kFence, 0), expected = copy;
        copy_past_cache(copy.data() + to, source.data() + from, bytes);
        std::copy_n(source.data() + from, bytes, expected.data() + to);
        ASSERT_EQ(copy, expected) << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

}  // namespace
}  // namespace deeptide::device
