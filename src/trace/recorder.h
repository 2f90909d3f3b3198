// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Records where one engine's time goes: phases that follow each other, and spans within them, for whoever listens.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

namespace deeptide::trace {

/// The training thread's phases. They follow each other without a gap, so their times add up to the run's.
enum class Phase : uint8_t { between, forward, backward, step, outside };
inline constexpr int kNumPhases = 5;
/// "between" (steps: data, and whatever else the program does), "forward", "backward", "step", "outside" (of training:
/// checkpoints and the like).
const char* text(Phase phase);

/// The kind of a span within a phase.
enum class Work : uint8_t { phase, unit, wait, file, optimizer, collective };
inline constexpr int kNumWorks = 6;
/// "phase", "unit", "wait", "file", "optimizer", "collective".
const char* text(Work work);

/// CLOCK_MONOTONIC, which all processes of a host share. Units: ns.
int64_t now_ns() noexcept;
/// Small, equal for all spans of a thread.
uint32_t thread_number() noexcept;

struct SpanRecord {
  Work work = Work::phase;
  Phase phase = Phase::between;  // in which it ended
  std::string_view name;         // "forward", "h.3", "gathering unit h.3"; valid during the call only
  std::string_view channel;      // of a collective
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t step = 0;   // optimizer steps that had ended
  int64_t bytes = 0;  // of a collective
  int ranks = 1;      // of its team
  uint32_t thread = 0;
  bool in_turn = false;  // on the training thread, and within no other span but a phase and a unit
};

/// Receives spans as they begin and end. Calls come one at a time, from any thread; a sink must not wait.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void begin(const SpanRecord&) noexcept {}
  virtual void end(const SpanRecord& span) noexcept = 0;
};

/// One engine's. Thread-safe. Without a sink, a span costs one load.
class Recorder {
 public:
  Recorder() = default;
  Recorder(const Recorder&) = delete;

  /// Begins a phase on this thread, and ends the one before. Always tells the process's flight log.
  void enter(Phase phase, int64_t step) noexcept;
  /// This thread computes with `unit` from now on, in `phase` as the flight log calls it.
  void enter_unit(const char* phase, int64_t step, std::string_view unit) noexcept;
  Phase phase() const { return phase_.load(std::memory_order_relaxed); }

  /// `sink` receives what begins from now on, and what is left of the phase, until it is removed; it outlives that.
  void add(Sink& sink);
  void remove(Sink& sink);
  bool is_on() const { return on_.load(std::memory_order_relaxed); }

  /// Reports a collective that has ended; it may have been under way beside anything else.
  void note_collective(std::string_view operation, std::string_view channel, int ranks, int64_t bytes,
                       int64_t begin_ns) noexcept;

 private:
  friend class Span;
  void begin(Work work, std::string_view name) noexcept;
  void end(SpanRecord span) noexcept;
  void end_unit(int64_t now) noexcept;

  std::atomic<bool> on_{false};
  std::atomic<Phase> phase_{Phase::outside};
  std::atomic<uint32_t> training_thread_{0};
  std::atomic<int64_t> step_{0};
  int64_t phase_begin_ns_ = 0;
  int64_t unit_begin_ns_ = 0;  // 0: in no unit
  char unit_[64] = {};
  std::mutex mutex_;  // guards the sinks, and what phases and units hold
  std::vector<Sink*> sinks_;
};

/// Calls Recorder::enter_unit; without a recorder, tells the flight log alone.
void enter_unit(Recorder* recorder, const char* phase, int64_t step, std::string_view unit) noexcept;

/// A span from construction to destruction. `name` must live as long.
class Span {
 public:
  /// `recorder`: null for none.
  Span(Recorder* recorder, Work work, std::string_view name) noexcept
      : recorder_(recorder != nullptr && recorder->is_on() ? recorder : nullptr) {
    if (recorder_ != nullptr) begin(work, name);
  }
  ~Span() {
    if (recorder_ != nullptr) end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void begin(Work work, std::string_view name) noexcept;
  void end() noexcept;

  Recorder* recorder_;
  Work work_ = Work::wait;
  bool outermost_ = false;
  int64_t begin_ns_ = 0;
  std::string_view name_;
};

/// Makes `recorder` this thread's while it lives: code that knows no engine, such as transfers of files, reports there.
class RecorderScope {
 public:
  explicit RecorderScope(Recorder* recorder) noexcept;
  ~RecorderScope();
  RecorderScope(const RecorderScope&) = delete;

  /// Null: none.
  static Recorder* current() noexcept;

 private:
  Recorder* before_;
};

}  // namespace deeptide::trace
