// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The file of one rank is a trace that viewers read.
#include "report/timeline.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace deeptide::report {
namespace {

TEST(Timeline, WritesSpansInMicrosecondsAndCollectivesAsPairs) {
  trace::Recorder recorder;
  Timeline timeline(3, 4, "a");
  recorder.add(timeline);
  recorder.enter(trace::Phase::step, 9);
  recorder.note_collective("all-gather", "gathers", 2, 64, trace::now_ns() - 5000);
  timeline.note_exchange(9);
  recorder.enter(trace::Phase::between, 10);
  recorder.remove(timeline);
  const std::string folder = testing::TempDir() + "/timeline_test";
  const auto trace = nlohmann::json::parse(std::ifstream(timeline.write(folder)));
  EXPECT_EQ(trace["deeptide"]["rank"], 3);
  EXPECT_EQ(trace["deeptide"]["exchanges"][0][0], 9);
  int phases = 0, begins = 0, ends = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "M") continue;
    EXPECT_EQ(event["pid"], 3);
    phases += event["ph"] == "X" && event["name"] == "step" && event["args"]["step"] == 9 ? 1 : 0;
    begins += event["ph"] == "b" && event["args"]["bytes"] == 64 ? 1 : 0;
    ends += event["ph"] == "e" ? 1 : 0;
  }
  EXPECT_EQ(phases, 1);
  EXPECT_EQ(begins, 1);
  EXPECT_EQ(ends, 1);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace deeptide::report
