// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts the engine's collectives by kind and size: how many bytes, how long, how fast.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/engine.h"
#include "trace/recorder.h"

namespace deeptide::report {

/// Listens to collectives. Thread-safe: they end on threads of their own while the program asks.
class CommsTable : public trace::Sink {
 public:
  explicit CommsTable(const CommsLoggerConfig& config) : config_(config) {}
  void end(const trace::SpanRecord& span) noexcept override;

  /// By operation, then by bytes.
  std::vector<CollectiveLine> lines() const;
  /// A table with DeepSpeed's columns; empty before the first collective.
  std::string text() const;

 private:
  struct Kind {
    std::vector<float> latencies_ms;  // the newest, for means without the slowest and the fastest tenth
    size_t next = 0;
    int64_t count = 0;
    int ranks = 1;  // of the last one's team
    double total_ms = 0.0;
  };
  bool is_wanted(std::string_view operation) const;

  const CommsLoggerConfig config_;
  mutable std::mutex mutex_;  // guards kinds_
  std::map<std::pair<std::string, int64_t>, Kind> kinds_;
};

}  // namespace deeptide::report
