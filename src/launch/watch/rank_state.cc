// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads a ring that another process writes, and the kernel's state of that process.
#include "launch/watch/rank_state.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <fstream>

namespace deeptide::launch {
namespace {

using trace::FlightEntry;
using trace::FlightRing;
using trace::kFlightEntries;

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
    // A rank stopped in the middle of a write leaves an odd version; use the data anyway.
    if (before % 2 == 0 && ring.place.version.load(std::memory_order_relaxed) == before) return;
  }
}

/// Returns nothing if the entry was overwritten meanwhile.
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
    Issued& newest = state.newest[read->channel];
    if (read->sequence >= newest.sequence) newest = {read->sequence, read->operation};
    if (read->waited_s > 0 && (!state.waiting || read->waited_s > state.waiting->waited_s)) state.waiting = read;
    if (state.phase.empty() && number == last) {  // no place was entered: use the last collective's
      state.step = read->step;
      state.phase = read->phase;
      state.module = read->unit;
    }
  }
}

std::optional<LinkState> read_slow_link(const FlightRing& ring) {
  const auto& link = ring.slow_link;
  const LinkState read{.from = link.from.load(std::memory_order_acquire),
                       .to = link.to.load(std::memory_order_relaxed),
                       .bytes_per_s = link.bytes_per_s.load(std::memory_order_relaxed),
                       .others = link.others.load(std::memory_order_relaxed)};
  return read.from < 0 ? std::nullopt : std::optional(read);
}

}  // namespace

std::optional<trace::FlightFacts> read_last_step(const FlightFiles& files) {
  const trace::FlightStep& step = files.ring().last_step;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t before = step.version.load(std::memory_order_acquire);
    const trace::FlightFacts facts = step.facts;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 != 0 || step.version.load(std::memory_order_relaxed) != before) continue;
    return facts.step == 0 ? std::nullopt : std::optional(facts);
  }
  return std::nullopt;
}

RankState read_state(int rank, pid_t pid, const FlightFiles& files) {
  RankState state;
  state.rank = rank;
  const pid_t trainer = files.ring().pid.load();
  state.pid = trainer != 0 ? trainer : pid;
  state.process = process_state(state.pid);
  read_place(files.ring(), state);
  read_collectives(files.ring(), state);
  state.mesh = files.mesh();
  state.slow_link = read_slow_link(files.ring());
  state.traced = files.ring().wish.traced.load(std::memory_order_acquire);
  state.silent_s = seconds_since(files.ring().last_event_ns.load());
  return state;
}

}  // namespace deeptide::launch
