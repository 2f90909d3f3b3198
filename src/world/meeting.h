// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets ranks meet at the store, and checks that they share a job and a world and that no rank occurs twice.
#pragma once

#include <chrono>
#include <string>

#include "deeptide/world.h"

namespace deeptide::world {

/// Meets the other ranks and returns the store for later use. Rank 0 publishes the size of the world. Each rank
/// compares it and signs in, which reveals two processes with the same rank. With a `token` (empty: none), rank 0 and
/// the other ranks prove to each other that they hold it, without revealing it. No rank continues before all have
/// proved it, and all later keys carry a prefix derived from it. Errors: ConfigError if the worlds differ or a rank
/// occurs twice; CommError for a wrong or missing token, or for ranks that do not arrive within `timeout`.
c10::intrusive_ptr<c10d::Store> meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     const std::string& token, std::chrono::milliseconds timeout);

}  // namespace deeptide::world
