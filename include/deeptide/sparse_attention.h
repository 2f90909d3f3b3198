// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention: which blocks of a sequence attend to which, and attention over these alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/export.h"

namespace deeptide::ops {

/// Returns `count` different numbers of [0, population), in any order.
using RandomSample = std::function<std::vector<int64_t>(int64_t population, int64_t count)>;

/// Errors: ValueError for settings that exclude each other, whatever the sequence.
DEEPTIDE_API void check_sparsity(const SparsityConfig& config);

/// Returns where heads attend, 1 or 0 for each pair of blocks: (num_heads, B, B) int64 for B = sequence_length / block.
/// `sample` chooses random blocks; without one they follow from a fixed seed.
/// Errors: ValueError as check_sparsity, and for a length that is no multiple of the block or too short.
/// Source: the layouts of DeepSpeed's SparsityConfig classes, bit for bit with Python's random.sample.
DEEPTIDE_API at::Tensor sparse_layout(const SparsityConfig& config, int64_t num_heads, int64_t sequence_length,
                                      const RandomSample& sample = {});

/// add: the mask is added to the scores; multiply: a score whose mask is 0 does not count.
enum class MaskMode : uint8_t { add, multiply };

struct DEEPTIDE_API SparseAttentionOptions {
  std::optional<double> scale;                    // absent: 1 / sqrt(D)
  bool causal = false;                            // positions attend to none after them, within blocks too
  std::optional<at::Tensor> relative_position;    // added to scaled scores; broadcasts to (N, H, S, S); has a gradient
  std::optional<at::Tensor> key_padding_mask_NS;  // without gradients, as the next
  std::optional<at::Tensor> attention_mask_SS;
  MaskMode key_padding_mask_mode = MaskMode::add;
  MaskMode attention_mask_mode = MaskMode::multiply;
};

/// Returns attention of N sequences and H heads over the blocks of `layout`, which sparse_layout() makes; a row that
/// attends to nothing is 0. Shapes: query, key, value (N, H, S, D), layout (H, S / block, S / block) -> (N, H, S, D).
/// Types: fp32, bf16, fp16, fp64, one for all three; softmax in fp32 at least. Differentiable, twice as well.
/// Memory: proportional to N H S D; scores exist for some rows of blocks at a time, in backward again.
/// Errors: ValueError for shapes and types that do not fit.
DEEPTIDE_API at::Tensor sparse_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const at::Tensor& layout, int64_t block,
                                         const SparseAttentionOptions& options = {});

}  // namespace deeptide::ops
