// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Who is late and who waits for it, in one line for each group of ranks that are in the same place.
#pragma once

#include <string>
#include <vector>

#include "launch/watch/rank_state.h"

namespace deeptide::launch {

/// The longest wait of any rank for a collective, in seconds; 0 when none waits. A rank that only computes, or is in a
/// collective of its own, does not count: long is not late.
double longest_wait(const std::vector<RankState>& states);

/// Ranks that need their stacks shown: those that are late (at most 8), and one of each of the first groups that wait.
std::vector<int> ranks_to_show(const std::vector<RankState>& states);

/// The report, a line a group: the late first, then those that wait; each with the stacks that its states hold.
/// "rank 5 on worker-2 is in backward of h.12.mlp at step 7; its last in 'reductions' is reduce-scatter 310; the others
/// are at 314". Late is who has not issued the collective that has been waited for longest, or is stopped meanwhile;
/// and, where the late wait themselves, whom they wait for.
/// `complete`: these are all ranks that there are.
std::string hang_report(const std::vector<RankState>& states, bool complete = true);

/// "0-4, 6".
std::string rank_list(std::vector<int> ranks);
/// "rank 3", "ranks 0-4, 6".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace deeptide::launch
