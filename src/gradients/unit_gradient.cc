// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Waits for what has left, and brings it back for those who want it whole.
#include "gradients/unit_gradient.h"

#include <ATen/ops/empty.h>

namespace deeptide::gradients {

using at::Tensor;

Tensor CpuPart::read(tiers::Block block) const {
  if (block.count > 0 && !arrived.empty()) arrived.at(static_cast<size_t>((block.end() - 1) / kBlock)).wait();
  return values.narrow(0, block.begin, block.count);
}

Tensor UnitGradient::sum() const {
  if (sums.defined()) return sums.copy().to(at::kFloat);
  if (!on_host) return rows.sum();
  const Tensor& stays = rows.rows[0];
  const Tensor left = on_host->read({0, on_host->values.numel()});
  Tensor whole = at::empty({stays.numel() + left.numel()}, stays.options().dtype(at::kFloat));
  whole.narrow(0, 0, stays.numel()).copy_(stays);
  whole.narrow(0, stays.numel(), left.numel()).copy_(left.to(stays.device()));
  return whole;
}

Tensor UnitGradient::sum_where_stepped() const {
  if (!on_host || rows.rows[0].numel() > 0) return sum();
  return on_host->read({0, on_host->values.numel()}).to(at::kFloat);
}

}  // namespace deeptide::gradients
