// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gathers whole rows, or those blocks that are not zero.
#include "zero/passes/whole_gradients.h"

#include "comm/codecs/nonzero_codec.h"

namespace deeptide::zero {

void WholeGradients::start(int index, comm::OwnRow own_row) {
  const sharding::Unit& unit = states_.unit(index);
  const std::string& name = unit.layout().name;
  at::Tensor whole = pool_.take(unit.numel(), at::kFloat), own = reducer_.gradient(index).sum();
  if (!reducer_.is_mostly_zero(index))
    return gathers_.start(name, std::move(whole), std::move(own), own_row, &teams_.of(unit.shard_over()));
  comm::all_gather_coded(teams_.whole(), comm::NonzeroCodec(), whole, own, pool_,
                         {"step", "gathering gradients of unit '" + name + "'"});
  gathers_.add_done(std::move(whole));
}

}  // namespace deeptide::zero
