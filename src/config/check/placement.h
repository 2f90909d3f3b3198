// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The section "deeptide.placement": which share of each kind of state lies in which tier.
#pragma once

#include "config/check/validate.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// Adds a problem for shares that cannot be read or do not add up, and for what does not go with other keys.
void check_placement(const Values& values, Problems& problems);

/// Fills the shares of a text without problems.
void read_placement(const Values& values, PlacementConfig& placement);

}  // namespace deeptide::config
