// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Encodes states, and equal states only once.
#include "launch/watch/state_exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "launch/system/payload.h"

namespace deeptide::launch {

using nlohmann::json;
using trace::FlightFacts;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectiveState, operation, channel, phase, unit, parameter, step, bytes, sequence,
                                   waited_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Issued, sequence, operation)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LinkState, from, to, bytes_per_s, others)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(StateQuestion, id, stacks_of, watch_s, trace_number, trace_steps,
                                                trace_folder)

namespace {

/// Ranks in the same place; has a process id only if there is one rank.
struct Place {
  std::vector<int> ranks;
  RankState state;
};

struct CountFact {
  const char* name;
  int64_t FlightFacts::*field;
};
constexpr CountFact kCounts[] = {
    {"step", &FlightFacts::step},       {"skipped_steps", &FlightFacts::skipped_steps},
    {"samples", &FlightFacts::samples}, {"train_batch", &FlightFacts::train_batch},
    {"tokens", &FlightFacts::tokens},   {"memory_bytes", &FlightFacts::memory_bytes},
};
struct ValueFact {
  const char* name;
  double FlightFacts::*field;
};
constexpr ValueFact kValues[] = {
    {"loss", &FlightFacts::loss},
    {"norm", &FlightFacts::norm},
    {"lr", &FlightFacts::lr},
    {"total_s", &FlightFacts::total_s},
    {"computing_s", &FlightFacts::computing_s},
    {"waiting_s", &FlightFacts::waiting_s},
    {"files_s", &FlightFacts::files_s},
    {"data_s", &FlightFacts::data_s},
    {"optimizer_s", &FlightFacts::optimizer_s},
    {"sent_bytes", &FlightFacts::sent_bytes},
    {"flops", &FlightFacts::flops},
    {"moved_bytes", &FlightFacts::moved_bytes},
};

FlightFacts facts_of(const json& from) {
  FlightFacts facts;
  for (const auto& [name, field] : kCounts) facts.*field = from.at(name);
  for (const auto& [name, field] : kValues)
    facts.*field = from.at(name).is_null() ? std::nan("") : from.at(name).get<double>();
  const std::string limit = from.at("limit");
  limit.copy(facts.limit, sizeof facts.limit - 1);
  return facts;
}

void to_json(json& to, const Place& place) {
  const RankState& state = place.state;
  to = {{"ranks", place.ranks},   {"process", state.process}, {"step", state.step},      {"phase", state.phase},
        {"module", state.module}, {"newest", state.newest},   {"silent", state.silent_s}};
  if (state.waiting) to["waiting"] = *state.waiting;
  if (state.mesh.front() != 0) to["mesh"] = state.mesh;
  if (state.slow_link) to["slow_link"] = *state.slow_link;
  if (!state.stacks.empty()) to["stacks"] = state.stacks;
  if (state.last_step) to["last_step"] = facts_json(*state.last_step);
  if (state.traced != 0) to["traced"] = state.traced;
  if (place.ranks.size() == 1) to["pid"] = state.pid;
}

void from_json(const json& from, Place& place) {
  RankState& state = place.state;
  place.ranks = from.at("ranks").get<std::vector<int>>();
  state.process = from.at("process").get<char>();
  state.step = from.at("step");
  state.phase = from.at("phase");
  state.module = from.at("module");
  state.newest = from.at("newest").get<std::map<std::string, Issued>>();
  state.silent_s = from.at("silent");
  if (from.contains("waiting")) state.waiting = from.at("waiting").get<CollectiveState>();
  state.mesh = from.value("mesh", state.mesh);
  if (from.contains("slow_link")) state.slow_link = from.at("slow_link").get<LinkState>();
  state.stacks = from.value("stacks", "");
  state.pid = from.value("pid", 0);
  state.traced = from.value("traced", uint64_t{0});
  if (from.contains("last_step")) state.last_step = facts_of(from.at("last_step"));
}

// Gives equal keys to ranks that differ only in rank, process, duration and the slow link.
std::string key_of(const RankState& state) {
  Place place{{}, state};
  place.state.slow_link.reset();
  place.state.silent_s = 0.0;
  if (place.state.waiting) place.state.waiting->waited_s = 0.0;
  return pack(place);
}

std::vector<Place> places_of(const std::vector<RankState>& states) {
  std::vector<Place> places;
  std::map<std::string, size_t> by_key;
  for (const RankState& state : states) {
    const auto [found, is_new] = by_key.try_emplace(key_of(state), places.size());
    if (is_new) places.push_back({{}, state});
    Place& place = places[found->second];
    place.ranks.push_back(state.rank);
    place.state.silent_s = std::max(place.state.silent_s, state.silent_s);
    if (!place.state.slow_link) place.state.slow_link = state.slow_link;
    if (state.waiting) place.state.waiting->waited_s = std::max(place.state.waiting->waited_s, state.waiting->waited_s);
  }
  return places;
}

}  // namespace

json facts_json(const FlightFacts& facts) {
  json to;
  for (const auto& [name, field] : kCounts) to[name] = facts.*field;
  for (const auto& [name, field] : kValues) to[name] = std::isfinite(facts.*field) ? json(facts.*field) : json();
  to["limit"] = std::string(facts.limit, ::strnlen(facts.limit, sizeof facts.limit));
  return to;
}

template <>
std::string encode(const StateQuestion& question) {
  return pack(question);
}

template <>
StateQuestion decode(const std::string& bytes) {
  return unpack<StateQuestion>(bytes);
}

template <>
std::string encode(const StateAnswer& answer) {
  return pack(json{{"id", answer.id}, {"places", places_of(answer.states)}});
}

template <>
StateAnswer decode(const std::string& bytes) {
  const auto from = unpack<json>(bytes);
  StateAnswer answer;
  answer.id = from.at("id");
  for (const auto& place : from.at("places").get<std::vector<Place>>()) {
    for (const int rank : place.ranks) {
      answer.states.push_back(place.state);
      answer.states.back().rank = rank;
    }
  }
  return answer;
}

}  // namespace deeptide::launch
