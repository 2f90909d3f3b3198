// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Defines the query of a job to each of its hosts, and the host's answer: the states of its ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/system/message.h"
#include "launch/watch/rank_state.h"

namespace deeptide::launch {

struct StateQuestion {
  uint64_t id = 0;             // repeated in the answer
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

/// Merges ranks of one host in the same place into one state with a list of ranks. They lose their process ids and
/// share the longest of their waits.
template <>
std::string encode(const StateAnswer& answer);
template <>
StateAnswer decode(const std::string& bytes);

}  // namespace deeptide::launch
