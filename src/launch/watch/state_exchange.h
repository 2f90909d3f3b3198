// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Defines the query of a job to each of its hosts, and the host's answer: the states of its ranks.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launch/system/message.h"
#include "launch/watch/rank_state.h"

namespace deeptide::launch {

struct StateQuestion {
  uint64_t id = 0;             // repeated in the answer
  std::vector<int> stacks_of;  // only these ranks, with stacks; empty: all ranks, without
  double watch_s = 0.0;        // the ranks tell of their steps for so long, and the answer has each rank's last one
  uint64_t trace_number = 0;   // a request for a timeline; 0: none
  int64_t trace_steps = 0;     // 0: end the one under way
  std::string trace_folder;
};

struct StateAnswer {
  uint64_t id = 0;
  std::vector<RankState> states;
};

/// An infinity or a NaN becomes null.
nlohmann::json facts_json(const trace::FlightFacts& facts);

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
