// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes the JSON of the Trace Event Format: spans as complete events, collectives, which overlap, as asynchronous
// ones.
#include "report/timeline.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "base/libraries/nlohmann.h"

namespace deeptide::report {

using nlohmann::json;
using trace::Work;

namespace {

constexpr size_t kMostEvents = 2'000'000;  // some 200 MB: a forgotten recording ends there
constexpr int64_t kShortest_ns = 1000;     // a wait that found all there tells nothing

double us(int64_t ns) { return static_cast<double>(ns) * 1e-3; }

}  // namespace

void Timeline::end(const trace::SpanRecord& span) noexcept {
  if (events_.size() >= kMostEvents) return;
  if (span.work == Work::wait && span.end_ns - span.begin_ns < kShortest_ns) return;
  events_.push_back({span.work, span.phase, std::string(span.name), std::string(span.channel), span.begin_ns,
                     span.end_ns, span.step, span.bytes, span.thread});
}

std::string Timeline::write(const std::string& folder) const {
  json events = json::array();
  events.push_back(
      {{"ph", "M"}, {"name", "process_name"}, {"pid", rank_}, {"args", {{"name", "rank " + std::to_string(rank_)}}}});
  events.push_back({{"ph", "M"}, {"name", "process_sort_index"}, {"pid", rank_}, {"args", {{"sort_index", rank_}}}});
  int64_t id = 0;
  for (const Event& event : events_) {
    json one = {{"name", event.name}, {"cat", trace::text(event.work)}, {"pid", rank_}, {"tid", event.thread}};
    one["ts"] = us(event.begin_ns);
    one["args"] = {{"step", event.step}, {"phase", trace::text(event.phase)}};
    if (event.work != Work::collective) {
      one["ph"] = "X";
      one["dur"] = us(event.end_ns - event.begin_ns);
      events.push_back(std::move(one));
      continue;
    }
    one["args"]["bytes"] = event.bytes;
    one["args"]["channel"] = event.channel;
    one["ph"] = "b";
    one["id"] = ++id;
    events.push_back(one);
    one["ph"] = "e";
    one["ts"] = us(event.end_ns);
    events.push_back(std::move(one));
  }
  std::filesystem::create_directories(folder);
  const std::string path = folder + "/trace.rank" + std::to_string(rank_) + ".json";
  std::ofstream file(path);
  const json all = {{"traceEvents", std::move(events)},
                    {"displayTimeUnit", "ms"},
                    {"deeptide", {{"rank", rank_}, {"world", world_}, {"clock", clock_}, {"exchanges", exchanges_}}}};
  file << write_json(all);
  file.close();
  if (!file) throw std::runtime_error("deeptide.timeline: cannot write '" + path + "'; check the folder and its space");
  return path;
}

}  // namespace deeptide::report
