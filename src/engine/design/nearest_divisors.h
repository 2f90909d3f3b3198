// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names the sizes of an axis that are possible, for errors about one that is not.
#pragma once

#include <string>

#include "base/libraries/format.h"

namespace deeptide::engine {

/// The numbers next to `wanted` that divide `ranks`: "2 or 4".
inline std::string nearest_divisors(int wanted, int ranks) {
  int below = 1, above = ranks;
  for (int each = 1; each <= ranks; ++each) {
    if (ranks % each != 0) continue;
    if (each < wanted) below = each;
    if (each > wanted && each < above) above = each;
  }
  return wanted >= ranks || below == above ? std::to_string(ranks) : format_text("{} or {}", below, above);
}

}  // namespace deeptide::engine
