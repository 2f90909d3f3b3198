// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives of tensors that are mostly zero, such as an embedding's gradient: blocks of zeros stay behind.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "device/memory.h"

namespace deeptide::comm {

/// Elements of a block. What travels of a row of a table, 64 or more elements, is little more than the row.
inline constexpr int64_t kNonzeroBlock = 32;

/// The functions below give what Group's collectives of their name give, bit for bit. Ranks first tell each other how
/// many blocks are not zero. A message then has one bit per block and the blocks that are not zero, as many as the rank
/// with the most of them has. Where that takes no fewer bytes than the whole tensor, all ranks send whole tensors.
/// Collective; return when all is there. CPU only. `messages`: where their memory comes from. Errors: as Group::wait.

/// Shapes: (W * N,) both.
void all_to_all_nonzero(Group& group, const at::Tensor& output, const at::Tensor& input, device::BufferPool& messages,
                        const Site& site);
/// Shapes: input (N,), output (W * N,).
void all_gather_nonzero(Group& group, const at::Tensor& output, const at::Tensor& input, device::BufferPool& messages,
                        const Site& site);

}  // namespace deeptide::comm
