// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The section "deeptide.placement": which share of each kind of state lies in which tier.
#pragma once

#include "config/check/validate.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// Fills the shares. Adds a problem for those that cannot be read or do not add up, and for what does not go with other
/// keys.
void read_placement(const Values& values, PlacementConfig& placement, Problems& problems);

}  // namespace deeptide::config
