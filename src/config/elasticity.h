// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Elastic batches: one global batch size that many numbers of ranks divide, as DeepSpeed's elasticity computes it.
#pragma once

#include <cstdint>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/errors.h"

namespace deeptide::config {

/// The number of ranks is not among those that the elastic batch suits.
class IncompatibleWorldSize : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

struct ElasticBatch {
  int64_t train = 0;
  std::vector<int64_t> valid_worlds;  // ascending; numbers of data-parallel ranks
  int64_t micro = 0;                  // the largest that divides a rank's part; 0 when no world was given
  int64_t preferred_micro = 0;        // version 0.2: the first that divides unless larger ones are preferred
};

/// The batch of the "elasticity" section. `world_size`: the current number of ranks, checked against the valid ones;
/// 0: unknown, which only version 0.1 can do without.
/// Errors: ConfigError naming the key; IncompatibleWorldSize listing the valid worlds.
/// Source: DeepSpeed 0.19.7, elasticity/elasticity.py; its division of ranks by nodes is exact here, not rounded.
ElasticBatch elastic_batch(const ElasticityConfig& config, int64_t world_size);

/// The same without the check of `world_size`: `micro` is 0 when it is not a valid one.
ElasticBatch elastic_batch_unchecked(const ElasticityConfig& config, int64_t world_size);

/// What a scheduler planned with (`text`: DEEPSPEED_ELASTICITY_CONFIG, JSON) must be what the job runs with.
/// Errors: ConfigError naming the key and both values.
void check_scheduler_contract(const ElasticityConfig& config, const char* text);

}  // namespace deeptide::config
