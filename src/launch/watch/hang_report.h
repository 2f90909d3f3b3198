// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names the late ranks and those that wait for them, one line per group of ranks in the same place.
#pragma once

#include <string>
#include <vector>

#include "launch/watch/rank_state.h"

namespace deeptide::launch {

/// The longest wait of any rank for a collective, in seconds; 0 when none waits. A rank that only computes, or is in a
/// collective of its own, does not count: long is not late.
double longest_wait(const std::vector<RankState>& states);

/// Ranks whose stacks the report needs: those that are late (at most 8), and one of each of the first waiting groups.
std::vector<int> ranks_to_show(const std::vector<RankState>& states);

/// The report, one line per group: late ranks first, then waiting ones, each with the stacks in its states.
/// "rank 5 on worker-2 is in backward of h.12.mlp at step 7; its last in 'reductions' is reduce-scatter 310; the others
/// are at 314". A rank is late if it has not issued the collective that has been waited for longest, or is stopped; if
/// a late rank waits itself, so are the ranks that it waits for. `complete`: `states` holds all ranks of the job.
std::string hang_report(const std::vector<RankState>& states, bool complete = true);

/// "0-4, 6".
std::string rank_list(std::vector<int> ranks);
/// "rank 3", "ranks 0-4, 6".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace deeptide::launch
