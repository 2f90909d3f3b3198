// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A timeline begins and ends at the steps that the configuration names.
#include "report/recordings.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

namespace deeptide::report {
namespace {

/// Runs `num_steps` steps; returns those in the file, or nothing if there is none.
std::set<int64_t> recorded_steps(const TimelineConfig& config, int64_t num_steps) {
  std::filesystem::remove_all(config.output_path);
  auto recorder = std::make_shared<trace::Recorder>();
  {
    Recordings recordings(config, recorder, {0, 1, "a"});
    recordings.follow(0);
    for (int64_t step = 0; step < num_steps; ++step) {
      recorder->enter(trace::Phase::step, step);
      recordings.note_exchange(step);
      recorder->enter(trace::Phase::between, step + 1);
      recordings.follow(step + 1);
    }
  }
  EXPECT_FALSE(recorder->is_on());
  std::set<int64_t> steps;
  std::ifstream file(config.output_path + "/trace.rank0.json");
  if (!file) return steps;
  const auto trace = nlohmann::json::parse(file);
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "step") steps.insert(event["args"]["step"].get<int64_t>());
  }
  std::filesystem::remove_all(config.output_path);
  return steps;
}

TEST(Recordings, HoldTheStepsThatTheConfigurationNames) {
  const std::string folder = testing::TempDir() + "/recordings_test";
  TimelineConfig config{.enabled = true, .output_path = folder, .start_step = 3, .num_steps = 2};
  EXPECT_EQ(recorded_steps(config, 6), (std::set<int64_t>{2, 3}));  // that had ended before
  config.start_step = 1;
  EXPECT_EQ(recorded_steps(config, 6), (std::set<int64_t>{0, 1}));
  config.num_steps = 100;
  EXPECT_EQ(recorded_steps(config, 3), (std::set<int64_t>{0, 1, 2}));  // the run ends first
  config.enabled = false;
  EXPECT_EQ(recorded_steps(config, 6), std::set<int64_t>());
}

}  // namespace
}  // namespace deeptide::report
