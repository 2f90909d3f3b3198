// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Simulated time: what a schedule would take if copies and computation took as long as they are said to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace deeptide::simulated {

/// A part of the machine that does one task at a time, in the order in which they are ready; computation has as many
/// as there are streams.
enum class Engine : uint8_t { compute, to_device, to_host, link };
inline constexpr size_t kNumEngines = 4;

/// Units: bytes / s; 0: a transfer takes no time.
using Bandwidths = std::array<double, kNumEngines>;

/// The cost of a task. Units: bytes, s.
struct Cost {
  Engine engine = Engine::compute;
  size_t bytes = 0;
  double seconds = 0;
};

/// Follows from the order of calls alone, so it is the same in each run and on each machine. Not thread-safe.
class Timeline {
 public:
  void set_bandwidths(const Bandwidths& bandwidths) { bandwidths_ = bandwidths; }
  /// Streams share so many queues of the hardware, in turn: nothing begins before what was issued to its queue before
  /// has begun. 0: each stream has its own.
  void set_connections(unsigned count) { begun_.assign(count, 0); }
  /// Adds a task to the stream: it begins once the host has issued it, the stream is free and its engine has time for
  /// all of it. Returns when it ends.
  double add(int stream, const Cost& cost);
  /// When all tasks of the stream so far have ended.
  double end_of(int stream);
  /// The stream's later tasks begin at `time` or later.
  void wait(int stream, double time);
  /// The host's later tasks are issued at `time` or later.
  void host_wait(double time);
  double host() const { return host_; }

 private:
  struct Span {
    double begin, end;
  };
  using Spans = std::vector<Span>;

  double& stream_end(int stream);
  double occupy(Spans& busy, double begin, double length) const;
  double* begun(int stream);

  Bandwidths bandwidths_{};
  double host_ = 0;
  std::vector<double> ends_;             // by stream
  std::vector<double> begun_;            // by connection: when what was issued last begins
  std::array<Spans, kNumEngines> busy_;  // by begin; what ended before the host's time is forgotten
};

}  // namespace deeptide::simulated
