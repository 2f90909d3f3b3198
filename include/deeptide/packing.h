// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sequences of mixed lengths in rows of one length, where each attends to itself alone: no row is mostly padding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

/// Indices of sequences by row: the longest first, each into the fullest row with room. Ascending within a row; rows by
/// their first. The same for the same lengths. Errors: ConfigError for a length that no row holds.
DEEPTIDE_API std::vector<std::vector<int64_t>> pack_lengths(std::span<const int64_t> lengths, int64_t row_length);

/// Which tokens attend to which, query before key: (R, L) -> (R, 1, L, L). `sequence_ids`: equal within a sequence,
/// negative for padding, which attends to itself, so that no row of the mask is empty. bool: true where a token
/// attends. A floating type: 0 there, its lowest value elsewhere, to be added to scores.
DEEPTIDE_API at::Tensor block_diagonal_mask(const at::Tensor& sequence_ids, bool causal = false,
                                            at::ScalarType dtype = at::kBool);

}  // namespace deeptide
