// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The running share decides where the next buffer is cut.
#include "tiers/split.h"

#include <algorithm>
#include <cmath>

#include "base/invariant.h"

namespace deeptide::tiers {

std::vector<int64_t> split(const std::vector<int64_t>& sizes, double leaving, int64_t block) {
  std::vector<int64_t> staying;
  int64_t total = 0, left = 0;
  for (const int64_t size : sizes) {
    total += size;
    const double wanted = leaving * static_cast<double>(total) - static_cast<double>(left);
    const int64_t blocks = (size + block - 1) / block;
    const double kept = (static_cast<double>(size) - wanted) / static_cast<double>(block);
    const int64_t stays = std::min(size, std::clamp<int64_t>(std::llround(kept), 0, blocks) * block);
    staying.push_back(wanted <= 0.0 ? size : stays);
    left += size - staying.back();
    const double error = static_cast<double>(left) - leaving * static_cast<double>(total);
    DEEPTIDE_INVARIANT(std::abs(error) <= static_cast<double>(block), left, " of ", total,
                       " leave; expected a share of ", leaving);
  }
  return staying;
}

}  // namespace deeptide::tiers
