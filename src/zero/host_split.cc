// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The running share decides where the next unit is cut.
#include "zero/host_split.h"

#include <algorithm>
#include <cmath>

#include "base/invariant.h"

namespace deeptide::zero {

std::vector<int64_t> split_for_host(const std::vector<int64_t>& numels, double share) {
  std::vector<int64_t> on_device;
  int64_t total = 0, on_host = 0;
  for (const int64_t numel : numels) {
    total += numel;
    const double wanted = share * static_cast<double>(total) - static_cast<double>(on_host);  // on the host
    const int64_t blocks = (numel + kSplitNumel - 1) / kSplitNumel;
    const double kept = (static_cast<double>(numel) - wanted) / static_cast<double>(kSplitNumel);
    const int64_t stays = std::min(numel, std::clamp<int64_t>(std::llround(kept), 0, blocks) * kSplitNumel);
    on_device.push_back(wanted <= 0.0 ? numel : stays);
    on_host += numel - on_device.back();
    const double error = static_cast<double>(on_host) - share * static_cast<double>(total);
    DEEPTIDE_INVARIANT(std::abs(error) <= static_cast<double>(kSplitNumel), "the host steps ", on_host, " of ", total,
                       " elements; expected a share of ", share);
  }
  return on_device;
}

}  // namespace deeptide::zero
