// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A section of a text as one value, for rooms that read nested sections whose entries have free names.
#pragma once

#include <string_view>

#include "base/json.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// The section at `path` ("data_efficiency.data_sampling") with every key of the table, absent and "auto" ones at their
/// defaults; null where there is none. Errors: std::logic_error for a path that is no section of the table.
JsonValue section_with_defaults(const Config& config, std::string_view path);

}  // namespace deeptide::config
