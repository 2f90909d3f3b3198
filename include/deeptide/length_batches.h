// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Batches of similar numbers of tokens from samples of different lengths, and learning rates for their sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

struct LengthBatchOptions {
  int64_t max_tokens = 0;  // of a micro-batch
  int64_t min_batch_size = 1;
  std::optional<int64_t> max_batch_size;  // samples of a micro-batch
  int64_t micro_batches_per_batch = 1;
  bool same_size = false;  // the micro-batches of a batch have equal numbers of samples
};

struct LengthBatches {
  std::vector<std::vector<int64_t>> micro_batches;  // samples; each batch is micro_batches_per_batch of them
  std::vector<int64_t> batch_sizes;                 // samples of each batch
  std::vector<int64_t> longest;                     // the longest sample of each batch
  std::vector<int64_t> left_out;                    // samples longer than max_tokens
};

/// Takes the samples `order`, indices of `lengths`, and grows one micro-batch after the other until the next sample
/// would exceed a limit. As in DeepSpeed 0.19.8, the last sample of the order is never taken, nor what is left of an
/// incomplete batch. Errors: ConfigError for a limit that is not positive, a negative length, or too few samples.
DEEPTIDE_API LengthBatches batches_by_length(std::span<const int64_t> lengths, std::span<const int64_t> order,
                                             const LengthBatchOptions& options);

enum class RateScaling : uint8_t { linear, sqrt, none };

/// The rate for a batch of `batch` samples where `rate` is meant for `base`: rate * batch / base, its root, or `rate`.
DEEPTIDE_API double scaled_rate(double rate, int64_t base, int64_t batch, RateScaling scaling);

}  // namespace deeptide
