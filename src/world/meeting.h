// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks' first words to each other at the store: same job, same world, each rank once.
#pragma once

#include <chrono>
#include <string>

#include "deeptide/world.h"

namespace deeptide::world {

/// Meets the others and returns the store to use from here on. Rank 0 says how large the world is; each other rank
/// compares, and signs in, so that two processes of one rank are found. With a `token` (empty: none), rank 0 and the
/// ranks prove to each other that they hold it, without showing it; none goes on before all have, and all later keys
/// stand under a prefix that follows from it.
/// Errors: ConfigError when the worlds differ or a rank comes twice; CommError for a wrong or missing token, or for
/// ranks that do not come within `timeout`.
c10::intrusive_ptr<c10d::Store> meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     const std::string& token, std::chrono::milliseconds timeout);

}  // namespace deeptide::world
