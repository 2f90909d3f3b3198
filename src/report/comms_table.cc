// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Applies the bandwidth formulas of nccl-tests: bus bandwidth is what a link carries, whatever the number of ranks.
#include "report/comms_table.h"

#include <algorithm>

#include "base/libraries/format.h"
#include "base/log.h"
#include "base/text.h"

namespace deeptide::report {
namespace {

constexpr size_t kKept = 1000;
constexpr double kTrim = 0.1;

double trimmed_mean(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  const auto cut = static_cast<size_t>(kTrim * static_cast<double>(values.size()));
  double sum = 0.0;
  for (size_t i = cut; i < values.size() - cut; ++i) sum += values[i];
  return sum / static_cast<double>(values.size() - 2 * cut);
}

/// DeepSpeed's spelling: "all_gather".
std::string spelled(std::string_view operation) {
  std::string name(operation);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace

bool CommsTable::is_wanted(std::string_view operation) const {
  if (config_.prof_all) return true;
  const auto same = [&](const std::string& wanted) { return spelled(wanted) == spelled(operation); };
  return std::any_of(config_.prof_ops.begin(), config_.prof_ops.end(), same);
}

void CommsTable::end(const trace::SpanRecord& span) noexcept {
  if (span.work != trace::Work::collective || !is_wanted(span.name)) return;
  const double ms = static_cast<double>(span.end_ns - span.begin_ns) * 1e-6;
  const std::lock_guard lock(mutex_);
  Kind& kind = kinds_[{spelled(span.name), span.bytes}];
  ++kind.count;
  kind.ranks = span.ranks;
  kind.total_ms += ms;
  if (kind.latencies_ms.size() < kKept) {
    kind.latencies_ms.push_back(static_cast<float>(ms));
  } else {
    kind.latencies_ms[kind.next++ % kKept] = static_cast<float>(ms);
  }
  if (!config_.verbose) return;
  log(LogLevel::info, format_text("comm op: {} | channel: {} | time (ms): {:.3f} | msg size: {} | step: {}",
                                  spelled(span.name), span.channel, ms, bytes_text(span.bytes), span.step));
}

std::vector<CollectiveLine> CommsTable::lines() const {
  const std::lock_guard lock(mutex_);
  std::vector<CollectiveLine> lines;
  for (const auto& [key, kind] : kinds_) {
    CollectiveLine line{.operation = key.first, .bytes = key.second, .count = kind.count, .total_ms = kind.total_ms};
    line.mean_ms = trimmed_mean(kind.latencies_ms);
    const double seconds = std::max(line.mean_ms, 1e-6) * 1e-3;
    const double others = (kind.ranks - 1.0) / kind.ranks;
    line.algorithm_gbps = static_cast<double>(key.second) * 8e-9 / seconds;
    const bool one_way = key.first == "send" || key.first == "receive" || key.first == "broadcast";
    line.bus_gbps = line.algorithm_gbps * (one_way ? 1.0 : others);
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string CommsTable::text() const {
  std::string text;
  std::string last;
  for (const CollectiveLine& line : lines()) {
    if (text.empty()) {
      text = format_text("{:<20}{:<16}{:<8}{:<20}{:<20}{:<20}{:<20}", "Comm. Op", "Message Size", "Count",
                         "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)");
    }
    if (line.operation != last) text += "\n" + line.operation;
    last = line.operation;
    text += format_text("\n{:<20}{:<16}{:<8}{:<20.2f}{:<20.3f}{:<20.2f}{:<20.2f}", "", bytes_text(line.bytes),
                        line.count, line.total_ms, line.mean_ms, line.algorithm_gbps, line.bus_gbps);
  }
  return text;
}

}  // namespace deeptide::report
