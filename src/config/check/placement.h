// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The section "deeptide.placement": which share of each kind of state lies in which tier.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/check/validate.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// Reads a size, such as "8GiB" or "500 MB"; nothing for any other text.
std::optional<int64_t> parse_bytes(const std::string& text);

/// Fills the shares. Adds a problem for those that cannot be read or do not add up, and for what does not go with other
/// keys.
void read_placement(const Values& values, PlacementConfig& placement, Problems& problems);

}  // namespace deeptide::config
