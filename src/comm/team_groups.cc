// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// There are few teams: a search is enough.
#include "comm/team_groups.h"

#include <algorithm>

#include "base/invariant.h"

namespace deeptide::comm {

Group* TeamGroups::find(const Team& team) const {
  const auto found =
      std::find_if(groups_.begin(), groups_.end(), [&](const Group* group) { return group->team() == team; });
  return found == groups_.end() ? nullptr : *found;
}

bool TeamGroups::has(const Team& team) const { return find(team) != nullptr; }

Group& TeamGroups::of(const Team& team) const {
  Group* found = find(team);
  DEEPTIDE_INVARIANT(found != nullptr, "no channel over team '", team.key(), "'");
  return *found;
}

int64_t TeamGroups::sent_bytes() const {
  int64_t bytes = 0;
  for (const Group* group : groups_) bytes += group->sent_bytes();
  return bytes;
}

}  // namespace deeptide::comm
