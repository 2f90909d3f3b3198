// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The query of a job to each of its hosts, and the host's answer: what its ranks are doing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/system/message.h"
#include "launch/watch/rank_state.h"

namespace deeptide::launch {

struct StateQuestion {
  uint64_t id = 0;             // the answer's too
  std::vector<int> stacks_of;  // only these ranks, with stacks; empty: all ranks, without
};

struct StateAnswer {
  uint64_t id = 0;
  std::vector<RankState> states;
};

template <>
std::string encode(const StateQuestion& question);
template <>
StateQuestion decode(const std::string& bytes);

/// Ranks of one host in the same place travel as one state with a list of ranks: they lose their process ids, and take
/// the longest of their waits.
template <>
std::string encode(const StateAnswer& answer);
template <>
StateAnswer decode(const std::string& bytes);

}  // namespace deeptide::launch
