// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rules between keys, which the table of single keys cannot express.
#pragma once

#include <string>
#include <vector>

#include "config/check/validate.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// Adds a problem for each pair of keys that contradict each other. Fills the shares of `placement`.
void check_rules(const Values& values, PlacementConfig& placement, Problems& problems);

/// Adds a line for each consequence that a reader of the text might not expect.
void note_decisions(const Values& values, std::vector<std::string>& decisions);

}  // namespace deeptide::config
