// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes the ring: one entry per collective, claimed by a counter.
#include "trace/flight_log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "trace/stack_signal.h"

namespace deeptide::trace {
namespace {

// Accurate to a few milliseconds, which suffices for waits of seconds, at a tenth of the exact clock's cost.
int64_t coarse_now_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// Keeps the end of long names, which distinguishes them: "…blocks.12.mlp".
template <size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  if (from.size() >= N) from.remove_prefix(from.size() - (N - 1));
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
  to[from.size()] = '\0';
}

/// Returns the launcher's ring, or null. The inherited file number may refer to another file by now, so checks the
/// size, the magic, and that no process has claimed the ring.
FlightRing* launchers_ring() {
  const char* text = std::getenv(kFlightVariable);
  if (text == nullptr || *text == '\0') return nullptr;
  char* end = nullptr;
  const long fd = std::strtol(text, &end, 10);
  struct stat status {};
  if (*end != '\0' || fd <= 2 || ::fstat(static_cast<int>(fd), &status) != 0) return nullptr;
  if (status.st_size != static_cast<off_t>(sizeof(FlightRing))) return nullptr;
  void* memory = ::mmap(nullptr, sizeof(FlightRing), PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(fd), 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* ring = static_cast<FlightRing*>(memory);
  int32_t nobody = 0;
  if (ring->magic.load() != kFlightMagic || !ring->pid.compare_exchange_strong(nobody, ::getpid())) {
    ::munmap(memory, sizeof(FlightRing));
    return nullptr;
  }
  ::fcntl(static_cast<int>(fd), F_SETFD, FD_CLOEXEC);
  return ring;
}

/// Makes an entry with this number the caller's to write, until it stores a number again. Fails where another thread
/// is faster.
bool claim(FlightEntry& entry, uint64_t number) noexcept {
  if (!entry.number.compare_exchange_strong(number, 0, std::memory_order_acquire)) return false;
  std::atomic_thread_fence(std::memory_order_release);
  return true;
}

}  // namespace

FlightLog::FlightLog(FlightRing& ring) : ring_(ring) {}

FlightLog::Ticket FlightLog::begin(const Flight& flight) noexcept {
  const uint64_t number = ring_.last_number.fetch_add(1, std::memory_order_relaxed) + 1;
  FlightEntry& entry = ring_.entries[(number - 1) % kFlightEntries];
  const uint64_t last = entry.number.load(std::memory_order_relaxed);
  const bool is_written_elsewhere = last == 0 && number > kFlightEntries;
  if (is_written_elsewhere || !claim(entry, last)) return 0;
  entry.sequence = flight.sequence;
  entry.step = flight.step;
  entry.bytes = flight.bytes;
  entry.rank = flight.rank;
  copy_text(entry.operation, flight.operation);
  copy_text(entry.channel, flight.channel);
  copy_text(entry.phase, flight.phase);
  copy_text(entry.unit, flight.unit);
  copy_text(entry.parameter, flight.parameter);
  const int64_t now = coarse_now_ns();
  entry.started_ns.store(now, std::memory_order_relaxed);
  entry.waiting_ns.store(0, std::memory_order_relaxed);
  entry.finished_ns.store(0, std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_release);
  ring_.rank.store(flight.rank, std::memory_order_relaxed);
  ring_.last_event_ns.store(now, std::memory_order_relaxed);
  return number;
}

FlightEntry* FlightLog::entry_of(Ticket ticket) noexcept {
  if (ticket == 0) return nullptr;
  FlightEntry& entry = ring_.entries[(ticket - 1) % kFlightEntries];
  return entry.number.load(std::memory_order_relaxed) == ticket ? &entry : nullptr;
}

void FlightLog::waiting(Ticket ticket) noexcept {
  FlightEntry* entry = entry_of(ticket);
  if (entry == nullptr || entry->waiting_ns.load(std::memory_order_relaxed) != 0) return;
  const int64_t now = coarse_now_ns();
  entry->waiting_ns.store(now, std::memory_order_relaxed);
  ring_.last_event_ns.store(now, std::memory_order_relaxed);
}

void FlightLog::waiting(Ticket ticket, int64_t step, std::string_view phase, std::string_view unit) noexcept {
  FlightEntry* entry = entry_of(ticket);
  if (entry == nullptr || entry->waiting_ns.load(std::memory_order_relaxed) != 0 || !claim(*entry, ticket)) return;
  entry->step = step;
  copy_text(entry->phase, phase);
  copy_text(entry->unit, unit);
  entry->number.store(ticket, std::memory_order_release);
  waiting(ticket);
}

void FlightLog::end(Ticket ticket) noexcept {
  FlightEntry* entry = entry_of(ticket);
  if (entry == nullptr) return;
  const int64_t now = coarse_now_ns();
  entry->finished_ns.store(now, std::memory_order_relaxed);
  ring_.last_event_ns.store(now, std::memory_order_relaxed);
}

void FlightLog::enter(int64_t step, std::string_view phase, std::string_view module) noexcept {
  FlightPlace& place = ring_.place;
  // Single writer: if another thread is updating, skip this update.
  uint64_t version = place.version.load(std::memory_order_relaxed);
  if (version % 2 != 0 || !place.version.compare_exchange_strong(version, version + 1)) return;
  place.step = step;
  copy_text(place.phase, phase);
  copy_text(place.module, module);
  place.version.store(version + 2, std::memory_order_release);
  ring_.last_event_ns.store(coarse_now_ns(), std::memory_order_relaxed);
}

void FlightLog::slow_link(int from, int to, double bytes_per_s, double others) noexcept {
  FlightLink& link = ring_.slow_link;
  link.to.store(to, std::memory_order_relaxed);
  link.bytes_per_s.store(static_cast<int64_t>(bytes_per_s), std::memory_order_relaxed);
  link.others.store(static_cast<int64_t>(others), std::memory_order_relaxed);
  link.from.store(from, std::memory_order_release);
}

void FlightLog::mesh(const std::array<int, 5>& sizes) noexcept {
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    ring_.mesh.sizes[axis].store(sizes[axis], std::memory_order_relaxed);
  }
}

bool FlightLog::is_watched() const noexcept {
  const int64_t until = ring_.wish.watched_until_ns.load(std::memory_order_relaxed);
  return until != 0 && coarse_now_ns() < until;
}

void FlightLog::note_step(const FlightFacts& facts) noexcept {
  FlightStep& step = ring_.last_step;
  uint64_t version = step.version.load(std::memory_order_relaxed);
  if (version % 2 != 0 || !step.version.compare_exchange_strong(version, version + 1)) return;
  step.facts = facts;
  step.version.store(version + 2, std::memory_order_release);
}

std::optional<TraceWish> FlightLog::trace_wish(uint64_t seen) const {
  const FlightWish& wish = ring_.wish;
  const uint64_t number = wish.trace_number.load(std::memory_order_acquire);
  if (number == seen) return std::nullopt;
  TraceWish read{number,
                 wish.trace_steps.load(std::memory_order_relaxed),
                 {wish.trace_folder, ::strnlen(wish.trace_folder, sizeof wish.trace_folder)}};
  return read;
}

FlightLog& flight_log() {
  static const bool answers = answer_stack_signals();
  static_cast<void>(answers);
  // Never freed: threads may still write while the process ends.
  static auto* ring = [] {
    FlightRing* shared = launchers_ring();
    return shared != nullptr ? shared : new FlightRing;
  }();
  static auto* log = new FlightLog(*ring);
  return *log;
}

}  // namespace deeptide::trace
