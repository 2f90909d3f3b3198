// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One page of `deeptide top`.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace deeptide::launch {

/// `job`: as HangWatch answers "top". At most `max_ranks` ranks have a line; a rank with most computing is among them.
std::string top_page(const nlohmann::json& job, size_t max_ranks);

}  // namespace deeptide::launch
