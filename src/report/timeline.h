// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps what this rank does for some steps, and writes it as a trace that Perfetto and Chrome show.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "trace/recorder.h"

namespace deeptide::report {

/// Times in the file are this host's CLOCK_MONOTONIC in us; `deeptide trace` puts hosts on one clock.
class Timeline : public trace::Sink {
 public:
  Timeline(int rank, int world, std::string clock) : rank_(rank), world_(world), clock_(std::move(clock)) {}

  void end(const trace::SpanRecord& span) noexcept override;
  /// All ranks leave an exchange of `step` now, as nearly at once as they ever do.
  void note_exchange(int64_t step) { exchanges_.emplace_back(step, trace::now_ns()); }
  /// Writes folder/trace.rank0.json and so on. Errors: std::runtime_error naming the file.
  std::string write(const std::string& folder) const;

 private:
  struct Event {
    trace::Work work;
    trace::Phase phase;
    std::string name, channel;
    int64_t begin_ns, end_ns, step, bytes;
    uint32_t thread;
  };

  const int rank_;
  const int world_;
  const std::string clock_;
  std::vector<Event> events_;
  std::vector<std::pair<int64_t, int64_t>> exchanges_;
};

}  // namespace deeptide::report
