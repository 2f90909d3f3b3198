// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two ways to number ranks, which no conversion mixes up.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide::world {

/// A rank of the job, as errors, logs and outcomes name it.
enum class WorldRank : int32_t { none = -1 };

/// A rank's place in one team: a row of what the team's ranks contribute, a slice of what they share.
enum class TeamIndex : int32_t { none = -1 };

constexpr int number(WorldRank rank) { return static_cast<int>(rank); }
constexpr int number(TeamIndex index) { return static_cast<int>(index); }
inline std::string text(WorldRank rank) { return "rank " + std::to_string(number(rank)); }

}  // namespace deeptide::world
