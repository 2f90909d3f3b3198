// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an engine holds, as pieces of logical tensors: what checkpoints and inspection name.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/shard_file.h"
#include "engine/bound_model.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::engine {

/// Which elements: those that this rank owns (saved exactly once), or all that it has in memory (loaded everywhere; at
/// stage 0 every rank holds all).
enum class Extent : uint8_t { owned, held };

/// Everything that this rank saves, or wants on load, as views of the live state. `optimizer`: null for none.
/// `moments`: optimizer states besides masters too.
std::vector<checkpoint::Piece> live_pieces(const BoundModel& model, const zero::ShardedOptimizer* optimizer,
                                           bool moments, Extent extent);

std::string buffer_role(int rank);
checkpoint::Piece buffer_piece(const NamedTensor& buffer, const std::string& role, const at::Tensor& storage);

}  // namespace deeptide::engine
