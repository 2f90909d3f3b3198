// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The running share decides where the next unit is cut.
#include "zero/host_split.h"

#include <algorithm>
#include <cmath>

#include "base/invariant.h"

namespace deeptide::zero {

int64_t HostSplit::on_device(int64_t numel) {
  numel_ += numel;
  const double wanted = share_ * static_cast<double>(numel_) - static_cast<double>(numel_on_host_);  // on the host
  if (wanted <= 0.0) return numel;
  const int64_t blocks = (numel + kSplitNumel - 1) / kSplitNumel;
  const double kept = (static_cast<double>(numel) - wanted) / static_cast<double>(kSplitNumel);
  const int64_t on_device = std::min(numel, std::clamp<int64_t>(std::llround(kept), 0, blocks) * kSplitNumel);
  numel_on_host_ += numel - on_device;
  const double error = static_cast<double>(numel_on_host_) - share_ * static_cast<double>(numel_);
  DEEPTIDE_INVARIANT(std::abs(error) <= static_cast<double>(kSplitNumel), "the host steps ", numel_on_host_, " of ",
                     numel_, " elements; expected a share of ", share_);
  return on_device;
}

}  // namespace deeptide::zero
