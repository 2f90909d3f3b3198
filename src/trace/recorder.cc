// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Passes spans to sinks, and phases to the flight log as well.
#include "trace/recorder.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "trace/flight_log.h"

namespace deeptide::trace {
namespace {

thread_local int span_depth = 0;
thread_local Recorder* thread_recorder = nullptr;

/// The flight log says where a rank hangs: it calls the time between steps forward, which comes next.
const char* place_of(Phase phase) {
  switch (phase) {
    case Phase::backward:
      return "backward";
    case Phase::step:
      return "step";
    default:
      return "forward";
  }
}

}  // namespace

const char* text(Phase phase) {
  static constexpr const char* kNames[] = {"between", "forward", "backward", "step", "outside"};
  return kNames[static_cast<size_t>(phase)];
}

const char* text(Work work) {
  static constexpr const char* kNames[] = {"phase", "unit", "wait", "file", "optimizer", "collective"};
  return kNames[static_cast<size_t>(work)];
}

int64_t now_ns() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

uint32_t thread_number() noexcept {
  static std::atomic<uint32_t> last{0};
  thread_local const uint32_t own = ++last;
  return own;
}

void Recorder::enter(Phase phase, int64_t step) noexcept {
  if (phase != Phase::outside) flight_log().enter(step, place_of(phase), "");
  training_thread_.store(thread_number(), std::memory_order_relaxed);
  const Phase before = phase_.exchange(phase, std::memory_order_relaxed);
  const int64_t step_before = step_.exchange(step, std::memory_order_relaxed);
  if (!is_on()) return;
  const std::lock_guard lock(mutex_);
  const int64_t now = now_ns();
  end_unit(now);
  if (phase_begin_ns_ != 0) {
    // A program that never says when its forward begins is taken to have begun it as the last step ended.
    const bool unsaid = before == Phase::between && phase == Phase::backward;
    const Phase past = unsaid ? Phase::forward : before;
    const SpanRecord span{.work = Work::phase,
                          .phase = past,
                          .name = text(past),
                          .channel = {},
                          .begin_ns = phase_begin_ns_,
                          .end_ns = now,
                          .step = step_before,
                          .thread = thread_number(),
                          .in_turn = true};
    for (Sink* sink : sinks_) sink->end(span);
  }
  phase_begin_ns_ = now;
  const SpanRecord span{.work = Work::phase,
                        .phase = phase,
                        .name = text(phase),
                        .channel = {},
                        .begin_ns = now,
                        .step = step,
                        .thread = thread_number(),
                        .in_turn = true};
  for (Sink* sink : sinks_) sink->begin(span);
}

void Recorder::enter_unit(const char* phase, int64_t step, std::string_view unit) noexcept {
  flight_log().enter(step, phase, unit);
  if (!is_on()) return;
  if (this->phase() == Phase::between && std::strcmp(phase, "forward") == 0) enter(Phase::forward, step);
  training_thread_.store(thread_number(), std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  const int64_t now = now_ns();
  end_unit(now);
  unit_begin_ns_ = now;
  if (unit.size() >= sizeof unit_) unit.remove_prefix(unit.size() - (sizeof unit_ - 1));
  std::memcpy(unit_, unit.data(), unit.size());
  unit_[unit.size()] = '\0';
  const SpanRecord span{.work = Work::unit,
                        .phase = this->phase(),
                        .name = unit_,
                        .channel = {},
                        .begin_ns = now,
                        .step = step,
                        .thread = thread_number()};
  for (Sink* sink : sinks_) sink->begin(span);
}

void enter_unit(Recorder* recorder, const char* phase, int64_t step, std::string_view unit) noexcept {
  if (recorder == nullptr) return flight_log().enter(step, phase, unit);
  recorder->enter_unit(phase, step, unit);
}

void Recorder::end_unit(int64_t now) noexcept {
  if (unit_begin_ns_ == 0) return;
  const SpanRecord span{.work = Work::unit,
                        .phase = phase(),
                        .name = unit_,
                        .channel = {},
                        .begin_ns = std::exchange(unit_begin_ns_, 0),
                        .end_ns = now,
                        .step = step_.load(std::memory_order_relaxed),
                        .thread = training_thread_.load(std::memory_order_relaxed)};
  for (Sink* sink : sinks_) sink->end(span);
}

void Recorder::add(Sink& sink) {
  const std::lock_guard lock(mutex_);
  if (sinks_.empty()) {
    phase_begin_ns_ = phase() == Phase::outside ? 0 : now_ns();
    unit_begin_ns_ = 0;
  }
  sinks_.push_back(&sink);
  on_.store(true, std::memory_order_relaxed);
}

void Recorder::remove(Sink& sink) {
  const std::lock_guard lock(mutex_);
  sinks_.erase(std::remove(sinks_.begin(), sinks_.end(), &sink), sinks_.end());
  on_.store(!sinks_.empty(), std::memory_order_relaxed);
}

void Recorder::note_collective(std::string_view operation, std::string_view channel, int ranks, int64_t bytes,
                               int64_t begin_ns) noexcept {
  if (!is_on()) return;
  end({.work = Work::collective,
       .name = operation,
       .channel = channel,
       .begin_ns = begin_ns,
       .end_ns = now_ns(),
       .bytes = bytes,
       .ranks = ranks});
}

void Recorder::begin(Work work, std::string_view name) noexcept {
  const std::lock_guard lock(mutex_);
  const SpanRecord span{.work = work,
                        .phase = phase(),
                        .name = name,
                        .channel = {},
                        .begin_ns = now_ns(),
                        .step = step_.load(std::memory_order_relaxed),
                        .thread = thread_number()};
  for (Sink* sink : sinks_) sink->begin(span);
}

void Recorder::end(SpanRecord span) noexcept {
  span.phase = phase();
  span.step = step_.load(std::memory_order_relaxed);
  span.thread = thread_number();
  span.in_turn = span.in_turn && span.thread == training_thread_.load(std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  for (Sink* sink : sinks_) sink->end(span);
}

void Span::begin(Work work, std::string_view name) noexcept {
  work_ = work;
  name_ = name;
  // The optimizer's span holds waits of its own: these count, and the rest of it is computing.
  outermost_ = work == Work::optimizer || span_depth++ == 0;
  begin_ns_ = now_ns();
  recorder_->begin(work, name);
}

void Span::end() noexcept {
  if (work_ != Work::optimizer) --span_depth;
  recorder_->end(
      {.work = work_, .name = name_, .channel = {}, .begin_ns = begin_ns_, .end_ns = now_ns(), .in_turn = outermost_});
}

RecorderScope::RecorderScope(Recorder* recorder) noexcept : before_(std::exchange(thread_recorder, recorder)) {}
RecorderScope::~RecorderScope() { thread_recorder = before_; }
Recorder* RecorderScope::current() noexcept { return thread_recorder; }

}  // namespace deeptide::trace
