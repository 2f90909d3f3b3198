// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A job's question to each of its hosts, and the host's answer: what the ranks there are doing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

/// As bytes, and back. Ranks of one host in the same place travel as one state with a list of ranks: those lose their
/// process ids, and take the longest of their waits. Errors of …_from_text: std::exception.
std::string to_text(const StateQuestion& question);
StateQuestion question_from_text(const std::string& text);
std::string to_text(const StateAnswer& answer);
StateAnswer answer_from_text(const std::string& text);

}  // namespace deeptide::launch
