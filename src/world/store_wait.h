// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A wait for keys of a store that the user's interrupt (^C) ends.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace deeptide::world {

/// Between two questions to a store; each nap is twice the last.
inline constexpr std::chrono::milliseconds kShortestNap{1}, kLongestNap{50};

/// Returns once the store has all `keys`. Errors: the store's own, after `timeout` or when it is lost; what the handler
/// of a signal throws.
void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout);

}  // namespace deeptide::world
