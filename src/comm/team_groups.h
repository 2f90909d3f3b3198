// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The channels of one purpose, by team.
#pragma once

#include <vector>

#include "comm/group.h"

namespace deeptide::comm {

/// One channel over all ranks that train together, others over parts of them. The groups outlive this value.
class TeamGroups {
 public:
  TeamGroups(Group& whole) : groups_{&whole} {}  // NOLINT: where there is one team, its channel is all there is
  void add(Group& group) { groups_.push_back(&group); }

  Group& whole() const { return *groups_.front(); }
  Group& of(const Team& team) const;
  bool has(const Team& team) const;
  /// Bytes that this rank has sent to the others so far.
  int64_t sent_bytes() const;

 private:
  Group* find(const Team& team) const;

  std::vector<Group*> groups_;
};

}  // namespace deeptide::comm
