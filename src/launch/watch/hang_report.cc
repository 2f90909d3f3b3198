// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares the ranks' rings: finds the awaited collective and the ranks that have not issued it.
#include "launch/watch/hang_report.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "base/text.h"

namespace deeptide::launch {
namespace {

constexpr size_t kMaxLateShown = 8;
constexpr size_t kMaxGroupsShown = 8;  // with stacks
constexpr size_t kMaxLines = 64;
constexpr size_t kMaxHostsNamed = 3;
constexpr size_t kMaxWaits = 64;  // waits followed from one late rank to the next

/// Returns the rank with the longest wait, which blocks the job; null if no rank waits.
const RankState* longest_waiting(const std::vector<RankState>& states) {
  const RankState* longest = nullptr;
  for (const RankState& state : states) {
    if (state.waiting && (!longest || state.waiting->waited_s > longest->waiting->waited_s)) longest = &state;
  }
  return longest;
}

bool is_stopped(const RankState& state) { return state.process == 'T' || state.process == 't'; }
bool has_ended(const RankState& state) { return state.process == 'Z' || state.process == 'X'; }

/// Compares numbers of the awaited channel only, because each channel has its own sequence.
bool holds_up(const RankState& state, const CollectiveState& awaited) {
  const auto newest = state.newest.find(awaited.channel);
  return newest == state.newest.end() || newest->second.sequence < awaited.sequence || is_stopped(state);
}

/// Returns the collective that each rank holds up; null: none.
std::vector<const CollectiveState*> judge(const std::vector<RankState>& states) {
  std::vector<const CollectiveState*> held_up(states.size());
  std::vector<const CollectiveState*> waits;
  if (const RankState* longest = longest_waiting(states)) waits.push_back(&*longest->waiting);
  for (size_t next = 0; next < waits.size(); ++next) {
    for (size_t i = 0; i < states.size(); ++i) {
      if (held_up[i] || !holds_up(states[i], *waits[next])) continue;
      held_up[i] = waits[next];
      // This rank is late because it waits itself: follow its wait.
      const auto same = [&](const auto* wait) {
        return wait->channel == states[i].waiting->channel && wait->sequence == states[i].waiting->sequence;
      };
      if (!states[i].waiting || waits.size() == kMaxWaits || std::any_of(waits.begin(), waits.end(), same)) continue;
      waits.push_back(&*states[i].waiting);
    }
  }
  return held_up;
}

/// Verbs for one rank ("is") and for several ("are").
struct Verbs {
  const char *is, *was, *has, *it, *its;
};
constexpr Verbs kOne{"is", "was", "has", "it", "its"}, kMany{"are", "were", "have", "they", "their"};

std::string place_of(const RankState& state, const Verbs& verbs) {
  const std::string is = has_ended(state) ? verbs.was : verbs.is;
  if (state.phase.empty()) return is + " not in the engine";
  return is + " in " + state.phase + (state.module.empty() ? "" : " of " + state.module) + " at step " +
         std::to_string(state.step);
}

std::string process_text(const RankState& state, const Verbs& verbs) {
  const std::string is = verbs.is, it = std::string("; ") + verbs.it + " ";
  if (is_stopped(state)) return is + " stopped (SIGSTOP or a debugger) and ";
  if (state.process == 'X') return is + " gone" + it;
  if (state.process == 'Z') return std::string(verbs.has) + " ended" + it;
  if (state.process == 'D') return is + " in the kernel, waiting for a device, and ";
  return "";
}

/// Returns "all-gather 90 of h.3" or, without a unit, the purpose: "all-gather 31: waiting for all ranks to …".
std::string collective_text(const CollectiveState& collective) {
  const std::string& unit = collective.unit;
  const char* before = unit.find(' ') == std::string::npos ? " of " : ": ";
  return collective.operation + " " + std::to_string(collective.sequence) + (unit.empty() ? "" : before + unit);
}

std::string late_text(const RankState& state, const CollectiveState& awaited, const Verbs& verbs) {
  std::string text = process_text(state, verbs) + place_of(state, verbs);
  if (state.waiting) {
    text += ", waiting for " + collective_text(*state.waiting);
  } else if (const auto newest = state.newest.find(awaited.channel); newest != state.newest.end()) {
    text += std::string("; ") + verbs.its + " last in '" + awaited.channel + "' is " + newest->second.operation + " " +
            std::to_string(newest->second.sequence);
  } else {
    text +=
        std::string("; ") + verbs.it + " " + verbs.has + " issued no recent collective in '" + awaited.channel + "'";
  }
  return text + "; the others are at " + std::to_string(awaited.sequence);
}

std::string waiting_text(const RankState& state, const Verbs& verbs) {
  const CollectiveState& wait = *state.waiting;
  std::string text = process_text(state, verbs) + "waiting for " + collective_text(wait);
  if (wait.bytes > 0) text += " (" + bytes_text(wait.bytes) + ")";
  return text + ", in " + wait.phase + " at step " + std::to_string(wait.step);
}

std::string text_of(const RankState& state, const CollectiveState* held_up, const Verbs& verbs) {
  if (held_up != nullptr) return late_text(state, *held_up, verbs);
  if (state.waiting) return waiting_text(state, verbs);
  return process_text(state, verbs) + place_of(state, verbs) + ", waiting for no collective";
}

struct RankGroup {
  const CollectiveState* held_up = nullptr;
  std::vector<const RankState*> members;

  bool late() const { return held_up != nullptr; }
  /// Orders the report: first the cause of the hang, which waits for no other rank or cannot continue.
  int place_in_report() const {
    const RankState& state = *members.front();
    return !late() ? 2 : state.waiting && !is_stopped(state) ? 1 : 0;
  }
};

std::vector<RankGroup> grouped(const std::vector<RankState>& states) {
  const std::vector<const CollectiveState*> held_up = judge(states);
  std::vector<RankGroup> groups;
  std::map<std::string, size_t> by_text;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto [found, is_new] = by_text.try_emplace(text_of(states[i], held_up[i], kOne), groups.size());
    if (is_new) groups.push_back({held_up[i], {}});
    groups[found->second].members.push_back(&states[i]);
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const RankGroup& a, const RankGroup& b) { return a.place_in_report() < b.place_in_report(); });
  return groups;
}

/// Returns " on worker-2, worker-3"; empty for this machine.
std::string hosts_text(const RankGroup& group) {
  std::vector<std::string> hosts;
  for (const RankState* state : group.members) {
    if (!state->host.empty() && (hosts.empty() || hosts.back() != state->host)) hosts.push_back(state->host);
  }
  if (hosts.empty()) return "";
  if (hosts.size() > kMaxHostsNamed) return " on " + std::to_string(hosts.size()) + " hosts";
  std::string text;
  for (const std::string& host : hosts) text += (text.empty() ? " on " : ", ") + host;
  return text;
}

/// Returns the longest wait in the group or, if no rank waits, the longest silence.
std::string since_text(const RankGroup& group) {
  double waited = 0.0, silent = 0.0;
  for (const RankState* state : group.members) {
    if (state->waiting) waited = std::max(waited, state->waiting->waited_s);
    silent = std::max(silent, state->silent_s);
  }
  char text[40] = "";
  if (waited > 0) {
    std::snprintf(text, sizeof text, ", for %.1f s", waited);
  } else if (group.late() && silent > 0) {
    std::snprintf(text, sizeof text, ", silent for %.1f s", silent);
  }
  return text;
}

std::string coordinates_of(const RankState& state) { return place_in(state.mesh, state.rank); }

std::string line_of(const RankGroup& group) {
  std::vector<int> ranks;
  for (const RankState* state : group.members) ranks.push_back(state->rank);
  const Verbs& verbs = ranks.size() == 1 ? kOne : kMany;
  const std::string place = ranks.size() == 1 ? coordinates_of(*group.members.front()) : "";
  return ranks_text(ranks) + place + hosts_text(group) + " " + text_of(*group.members.front(), group.held_up, verbs) +
         since_text(group) + "\n";
}

std::string rank_on_host(const std::vector<RankState>& states, int rank) {
  const auto found = std::find_if(states.begin(), states.end(), [&](const auto& state) { return state.rank == rank; });
  const bool known = found != states.end() && !found->host.empty();
  return "rank " + std::to_string(rank) + (known ? " on " + found->host : "");
}

/// Returns the line about the slow link over the network; empty if none is.
std::string link_line(const std::vector<RankState>& states) {
  const auto found = std::find_if(states.begin(), states.end(), [](const auto& state) { return state.slow_link; });
  if (found == states.end()) return "";
  const LinkState& link = *found->slow_link;
  return "slow link so far: from " + rank_on_host(states, link.from) + " to " + rank_on_host(states, link.to) + ", " +
         bytes_text(link.bytes_per_s) + "/s (others " + bytes_text(link.others) + "/s)\n";
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
  size_t late = 0, waiting = 0;
  for (const RankGroup& group : grouped(states)) {
    for (const RankState* state : group.members) {
      if (has_ended(*state)) continue;
      const bool shown =
          group.late() ? late++ < kMaxLateShown : state == group.members.front() && waiting++ < kMaxGroupsShown;
      if (shown) ranks.push_back(state->rank);
    }
  }
  return ranks;
}

std::string hang_report(const std::vector<RankState>& states, bool complete) {
  const std::vector<RankGroup> groups = grouped(states);
  std::string report;
  for (size_t i = 0; i < groups.size() && i < kMaxLines; ++i) {
    report += line_of(groups[i]);
    for (const RankState* state : groups[i].members) {
      if (state->stacks.empty()) continue;
      report += "  rank " + std::to_string(state->rank) + coordinates_of(*state) + ", process " +
                std::to_string(state->pid) + (state->host.empty() ? "" : " on " + state->host) + ":\n" +
                indented(state->stacks);
    }
  }
  if (groups.size() > kMaxLines) report += "and " + std::to_string(groups.size() - kMaxLines) + " more groups\n";
  if (complete && longest_waiting(states) != nullptr && !groups.front().late()) {
    report += "every rank has issued the awaited collective: the transport between the ranks makes no progress\n";
  }
  return report + link_line(states);
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

std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + rank_list(ranks);
}

}  // namespace deeptide::launch
