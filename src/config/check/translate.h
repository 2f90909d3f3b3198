// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Older spellings of a wish, filled into the fields of the present ones.
#pragma once

#include <string>
#include <vector>

#include "config/check/values.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// Fills the fields that keys without a field of their own ask for. The present spelling wins where both are given.
void translate(const Values& values, Config::Sections& sections);

/// Adds a line for each key that `translate` reads.
void note_translations(const Values& values, std::vector<std::string>& decisions);

}  // namespace deeptide::config
