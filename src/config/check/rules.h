// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What holds between keys, beyond what the table says of each.
#pragma once

#include <string>
#include <vector>

#include "config/check/validate.h"

namespace deeptide::config {

/// Adds a problem for each pair of keys that contradict each other.
void check_rules(const Values& values, Problems& problems);

/// What the choices mean that a reader of the text might not expect, one line each.
void note_decisions(const Values& values, std::vector<std::string>& decisions);

}  // namespace deeptide::config
