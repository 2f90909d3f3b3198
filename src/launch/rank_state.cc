// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reading a ring that another process writes, and the kernel's word on the process.
#include "launch/rank_state.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/json.h"

namespace deeptide::launch {
namespace {

using comm::FlightEntry;
using comm::FlightRing;
using comm::kFlightEntries;

double seconds_since(int64_t then_ns) {
  if (then_ns == 0) return 0.0;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::max(0.0, static_cast<double>(now.tv_sec * 1'000'000'000LL + now.tv_nsec - then_ns) * 1e-9);
}

template <size_t N>
std::string text_of(const char (&text)[N]) {
  return {text, ::strnlen(text, N)};
}

char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 'X';
  const size_t name_end = line.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= line.size() ? '?' : line[name_end + 2];
}

void read_place(const FlightRing& ring, RankState& state) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t before = ring.place.version.load(std::memory_order_acquire);
    state.step = ring.place.step;
    state.phase = text_of(ring.place.phase);
    state.module = text_of(ring.place.module);
    std::atomic_thread_fence(std::memory_order_acquire);
    // A rank that was stopped while it wrote stays odd: what there is will do.
    if (before % 2 == 0 && ring.place.version.load(std::memory_order_relaxed) == before) return;
  }
}

/// Nothing if it was overwritten meanwhile.
std::optional<CollectiveState> read_entry(const FlightEntry& entry, uint64_t number) {
  if (entry.number.load(std::memory_order_acquire) != number) return std::nullopt;
  CollectiveState read{text_of(entry.operation),
                       text_of(entry.channel),
                       text_of(entry.phase),
                       text_of(entry.unit),
                       text_of(entry.parameter),
                       entry.step,
                       entry.bytes,
                       entry.sequence};
  const int64_t waiting = entry.waiting_ns.load(std::memory_order_relaxed);
  const bool finished = entry.finished_ns.load(std::memory_order_relaxed) != 0;
  read.waited_s = finished || waiting == 0 ? 0.0 : std::max(seconds_since(waiting), 1e-9);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (entry.number.load(std::memory_order_relaxed) != number) return std::nullopt;
  return read;
}

void read_collectives(const FlightRing& ring, RankState& state) {
  const uint64_t last = ring.last_number.load(std::memory_order_acquire);
  const uint64_t first = last > kFlightEntries ? last - kFlightEntries + 1 : 1;
  for (uint64_t number = first; number <= last; ++number) {
    const auto read = read_entry(ring.entries[(number - 1) % kFlightEntries], number);
    if (!read) continue;
    if (read->sequence >= state.newest[read->channel]) {
      state.newest[read->channel] = read->sequence;
      state.newest_operation[read->channel] = read->operation;
    }
    if (read->waited_s > 0 && (!state.waiting || read->waited_s > state.waiting->waited_s)) state.waiting = read;
    if (state.phase.empty() && number == last) {  // nobody told the place: the last collective's
      state.step = read->step;
      state.phase = read->phase;
      state.module = read->unit;
    }
  }
}

void put(JsonValue& object, const char* key, JsonValue value) {
  object.kind = JsonKind::object;
  object.members.push_back({key, 0, std::move(value)});
}

void put_text(JsonValue& object, const char* key, const std::string& text) {
  if (!text.empty()) put(object, key, JsonValue(std::string_view(text)));
}

std::string get_text(const JsonValue& object, const char* key) {
  const JsonMember* member = object.find(key);
  return member ? member->value.string : "";
}

double get_number(const JsonValue& object, const char* key) {
  const JsonMember* member = object.find(key);
  return member ? member->value.number : 0.0;
}

int64_t get_integer(const JsonValue& object, const char* key) {
  const JsonMember* member = object.find(key);
  return member ? member->value.integer : 0;
}

JsonValue json_of(const CollectiveState& state) {
  JsonValue object;
  put_text(object, "operation", state.operation);
  put_text(object, "channel", state.channel);
  put_text(object, "phase", state.phase);
  put_text(object, "unit", state.unit);
  put_text(object, "parameter", state.parameter);
  put(object, "step", JsonValue(state.step));
  put(object, "bytes", JsonValue(state.bytes));
  put(object, "sequence", JsonValue(static_cast<int64_t>(state.sequence)));
  put(object, "waited_s", JsonValue(state.waited_s));
  return object;
}

}  // namespace

RankState read_state(int rank, pid_t pid, const FlightFiles& files) {
  RankState state;
  state.rank = rank;
  const pid_t trainer = files.ring().pid.load();
  state.pid = trainer != 0 ? trainer : pid;
  state.process = process_state(state.pid);
  read_place(files.ring(), state);
  read_collectives(files.ring(), state);
  state.silent_s = seconds_since(files.ring().last_event_ns.load());
  return state;
}

std::string to_json(const RankState& state) {
  JsonValue object;
  put(object, "rank", JsonValue(int64_t{state.rank}));
  put_text(object, "host", state.host);
  put(object, "pid", JsonValue(int64_t{state.pid}));
  put_text(object, "process", std::string(1, state.process));
  put(object, "step", JsonValue(state.step));
  put_text(object, "phase", state.phase);
  put_text(object, "module", state.module);
  if (state.waiting) put(object, "waiting", json_of(*state.waiting));
  JsonValue newest;
  newest.kind = JsonKind::object;
  for (const auto& [channel, sequence] : state.newest) {
    JsonValue one;
    put(one, "sequence", JsonValue(static_cast<int64_t>(sequence)));
    put_text(one, "operation", state.newest_operation.at(channel));
    newest.members.push_back({channel, 0, one});
  }
  put(object, "newest", newest);
  put(object, "silent_s", JsonValue(state.silent_s));
  put_text(object, "stacks", state.stacks);
  return to_text(object);
}

RankState state_from_json(const std::string& text) {
  const JsonValue object = parse_json(text, "rank state");
  RankState state;
  state.rank = static_cast<int>(get_integer(object, "rank"));
  state.host = get_text(object, "host");
  state.pid = static_cast<pid_t>(get_integer(object, "pid"));
  const std::string process = get_text(object, "process");
  state.process = process.empty() ? '?' : process[0];
  state.step = get_integer(object, "step");
  state.phase = get_text(object, "phase");
  state.module = get_text(object, "module");
  if (const JsonMember* waiting = object.find("waiting")) {
    const JsonValue& value = waiting->value;
    state.waiting = CollectiveState{get_text(value, "operation"), get_text(value, "channel"),
                                    get_text(value, "phase"),     get_text(value, "unit"),
                                    get_text(value, "parameter"), get_integer(value, "step"),
                                    get_integer(value, "bytes"),  static_cast<uint64_t>(get_integer(value, "sequence")),
                                    get_number(value, "waited_s")};
  }
  if (const JsonMember* newest = object.find("newest")) {
    for (const JsonMember& member : newest->value.members) {
      state.newest[member.key] = static_cast<uint64_t>(get_integer(member.value, "sequence"));
      state.newest_operation[member.key] = get_text(member.value, "operation");
    }
  }
  state.silent_s = get_number(object, "silent_s");
  state.stacks = get_text(object, "stacks");
  return state;
}

}  // namespace deeptide::launch
