// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sizes of pages, and of what can be mapped at all; sizes rounded up to multiples.
#pragma once

#include <cstdint>

namespace deeptide::device {

inline constexpr int64_t kPage = 4096;
inline constexpr int64_t kLargePage = 2 << 20;
inline constexpr int64_t kMostBytes = int64_t{1} << 56;  // more than any machine addresses; sums of a few of them fit

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace deeptide::device
