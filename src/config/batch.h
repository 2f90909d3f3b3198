// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The three batch sizes for one world: what is given determines the rest.
#pragma once

#include <cstdint>
#include <string>

#include "deeptide/config.h"

namespace deeptide::config {

/// The sizes for `world_size` data-parallel ranks; `origin` opens each error.
/// Errors: ConfigError, in DeepSpeed's words and with a cure, if sizes are missing, not positive, or do not multiply.
BatchSizes batch_sizes(const BatchConfig& batch, int64_t world_size, const std::string& origin);

}  // namespace deeptide::config
