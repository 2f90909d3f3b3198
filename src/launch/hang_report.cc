// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Comparing the ranks' rings: the collective that is waited for, and who has not issued it.
#include "launch/hang_report.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "launch/rank_process.h"

namespace deeptide::launch {
namespace {

constexpr size_t kMaxLateShown = 8;

/// The wait that has lasted longest: what the job hangs on.
const RankState* longest_waiting(const std::vector<RankState>& states) {
  const RankState* longest = nullptr;
  for (const RankState& state : states) {
    if (state.waiting && (!longest || state.waiting->waited_s > longest->waiting->waited_s)) longest = &state;
  }
  return longest;
}

std::string place_of(const RankState& state) {
  if (state.phase.empty()) return "is not in the engine";
  const std::string at = " at step " + std::to_string(state.step);
  return "is in " + state.phase + (state.module.empty() ? "" : " of " + state.module) + at;
}

std::string process_text(const RankState& state) {
  switch (state.process) {
    case 'T':
    case 't':
      return "is stopped (SIGSTOP or a debugger) and ";
    case 'X':
      return "is gone; it ";
    case 'Z':
      return "has ended; it ";
    case 'D':
      return "is in the kernel, waiting for a device, and ";
    default:
      return "";
  }
}

std::string number_of(const CollectiveState& collective) {
  return collective.operation + " " + std::to_string(collective.sequence);
}

bool is_late(const RankState& state, const CollectiveState& awaited) {
  const auto newest = state.newest.find(awaited.channel);
  return newest == state.newest.end() || newest->second < awaited.sequence;
}

std::string late_text(const RankState& state, const CollectiveState& awaited) {
  std::string text = process_text(state) + place_of(state);
  if (state.waiting) {
    text += ", waiting for " + number_of(*state.waiting) + " of " + state.waiting->unit;
  } else if (const auto newest = state.newest.find(awaited.channel); newest != state.newest.end()) {
    text += "; its last in '" + awaited.channel + "' is " + state.newest_operation.at(awaited.channel) + " " +
            std::to_string(newest->second);
  } else {
    text += "; it has issued nothing in '" + awaited.channel + "'";
  }
  return text + "; the others are at " + std::to_string(awaited.sequence);
}

std::string waiting_text(const RankState& state) {
  const CollectiveState& wait = *state.waiting;
  std::string text = process_text(state) + "waiting for " + number_of(wait);
  if (!wait.unit.empty()) text += " of " + wait.unit;
  if (wait.bytes > 0) text += " (" + bytes_text(wait.bytes) + ")";
  return text + ", in " + wait.phase + " at step " + std::to_string(wait.step);
}

std::string text_of(const RankState& state, const CollectiveState* awaited) {
  if (awaited != nullptr && is_late(state, *awaited)) return late_text(state, *awaited);
  return state.waiting ? waiting_text(state) : process_text(state) + place_of(state) + ", waiting for no collective";
}

struct Group {
  std::string text;
  bool late = false;
  std::vector<const RankState*> members;
};

std::vector<Group> grouped(const std::vector<RankState>& states) {
  const RankState* longest = longest_waiting(states);
  const CollectiveState* awaited = longest ? &*longest->waiting : nullptr;
  std::vector<Group> groups;
  for (const RankState& state : states) {
    const std::string text = text_of(state, awaited);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.text == text; });
    if (group == groups.end()) {
      groups.push_back({text, awaited != nullptr && is_late(state, *awaited), {}});
      group = groups.end() - 1;
    }
    group->members.push_back(&state);
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.late && !b.late; });
  return groups;
}

std::string indented(const std::string& text) {
  std::string result = "    ";
  for (size_t i = 0; i < text.size(); ++i) {
    result += text[i];
    if (text[i] == '\n' && i + 1 < text.size()) result += "    ";
  }
  return result.back() == '\n' ? result : result + "\n";
}

}  // namespace

double longest_wait(const std::vector<RankState>& states) {
  const RankState* longest = longest_waiting(states);
  return longest ? longest->waiting->waited_s : 0.0;
}

std::vector<int> ranks_to_show(const std::vector<RankState>& states) {
  std::vector<int> ranks;
  size_t late = 0;
  for (const Group& group : grouped(states)) {
    for (const RankState* state : group.members) {
      if (group.late ? late++ < kMaxLateShown : state == group.members.front()) ranks.push_back(state->rank);
    }
  }
  return ranks;
}

std::string hang_report(const std::vector<RankState>& states) {
  std::string report;
  for (const Group& group : grouped(states)) {
    std::vector<int> ranks;
    double waited = 0.0;
    for (const RankState* state : group.members) {
      ranks.push_back(state->rank);
      if (state->waiting) waited = std::max(waited, state->waiting->waited_s);
    }
    char since[40] = "";
    if (waited > 0) std::snprintf(since, sizeof since, ", for %.1f s", waited);
    report += std::string(ranks.size() == 1 ? "rank " : "ranks ") + rank_list(ranks) + " " + group.text + since + "\n";
    for (const RankState* state : group.members) {
      if (state->stacks.empty()) continue;
      report += "  rank " + std::to_string(state->rank) + ", process " + std::to_string(state->pid) +
                (state->host.empty() ? "" : " on " + state->host) + ":\n" + indented(state->stacks);
    }
  }
  return report;
}

std::string rank_list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[first]);
    if (last > first) text += (last == first + 1 ? ", " : "-") + std::to_string(ranks[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace deeptide::launch
