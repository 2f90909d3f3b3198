// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// "Did you mean": the known key nearest to an unknown one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/table/schema.h"

namespace deeptide::config {

/// The number of insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
size_t edit_distance(std::string_view a, std::string_view b);

/// The candidate near enough to `name` to be what was meant, or an empty string.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

/// The hint for the unknown key `name` in a section with `siblings`: where it belongs or which key was meant.
std::string suggest(std::string_view name, const std::vector<std::string>& siblings, std::string_view section);

}  // namespace deeptide::config
