// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One page of `deeptide top`.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace deeptide::launch {

/// `job`: as HangWatch answers "top". Fits into `rows` lines of `columns`; 0: as many as there are. Where not all ranks
/// fit, those that compute longest are among the ones shown.
std::string top_page(const nlohmann::json& job, size_t rows, size_t columns);

}  // namespace deeptide::launch
