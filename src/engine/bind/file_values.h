// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Values that files were copied from into a model without memory: each rank reads those of its slice alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "engine/bind/channels.h"
#include "sharding/unit.h"

namespace deeptide::engine {

/// Collective. Tells for each unit whether its large parameters were all built under zero.Init and then copied from
/// files that are mapped, and whether all ranks have the same parts of files of the same names and sizes. Units that
/// are not sharded are none: every rank needs all of them.
std::vector<bool> find_units_of_files(Channels& channels, const std::vector<std::unique_ptr<sharding::Unit>>& units);

/// Collective over `holders`. Reads this rank's slice into its place in `whole`; the rest is undefined. Parameters that
/// have values already are rank 0's. Shapes: whole (unit.numel(),).
void read_own_slice(const sharding::Unit& unit, comm::Group& holders, at::Tensor whole);

}  // namespace deeptide::engine
