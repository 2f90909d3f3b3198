// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Elastic batches: one global batch size that many numbers of ranks divide, as DeepSpeed's elasticity computes it.
#pragma once

#include <cstdint>

#include "deeptide/config.h"
#include "deeptide/errors.h"

namespace deeptide::config {

/// The elastic batch does not suit this number of ranks.
class IncompatibleWorldSize : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

/// Computes the batch of the "elasticity" section. `world_size`: the current number of ranks, checked against the valid
/// ones; 0: unknown, which only version 0.1 allows.
/// Errors: ConfigError naming the key; IncompatibleWorldSize listing the valid worlds.
/// Source: DeepSpeed 0.19.7, elasticity/elasticity.py; its division of ranks by nodes is exact here, not rounded.
ElasticBatch elastic_batch(const ElasticityConfig& config, int64_t world_size);

/// Computes the batch without checking `world_size`: `micro` is 0 when it is not valid.
ElasticBatch elastic_batch_unchecked(const ElasticityConfig& config, int64_t world_size);

/// Checks that the job runs with the section that its scheduler planned with (`text`: DEEPSPEED_ELASTICITY_CONFIG,
/// JSON). Errors: ConfigError naming the key and both values.
void check_scheduler_contract(const ElasticityConfig& config, const char* text);

}  // namespace deeptide::config
