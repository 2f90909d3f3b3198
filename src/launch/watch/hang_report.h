// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names the late ranks and those that wait for them, one line per group of ranks in the same place.
#pragma once

#include <string>
#include <vector>

#include "launch/watch/rank_state.h"

namespace deeptide::launch {

/// Returns the longest wait of any rank for a collective, in seconds; 0 if no rank waits. Ranks that only compute, or
/// wait in a collective of the user's own, do not count.
double longest_wait(const std::vector<RankState>& states);

/// Returns the ranks whose stacks the report needs: late ranks (at most 8), and one rank of each of the first 8 waiting
/// groups.
std::vector<int> ranks_to_show(const std::vector<RankState>& states);

/// Returns the report, one line per group: late ranks first, then waiting ranks, with the stacks in their states.
/// "rank 5 on worker-2 is in backward of h.12.mlp at step 7; its last in 'reductions' is reduce-scatter 310; the others
/// are at 314". A rank is late if it has not issued the collective with the longest wait, or is stopped. If a late
/// rank waits itself, the ranks that it waits for are late too. Last comes the link over the network that is slower
/// than the others, if one is. `complete`: `states` holds all ranks of the job.
std::string hang_report(const std::vector<RankState>& states, bool complete = true);

/// Returns "0-4, 6".
std::string rank_list(std::vector<int> ranks);
/// Returns "rank 3" or "ranks 0-4, 6".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace deeptide::launch
