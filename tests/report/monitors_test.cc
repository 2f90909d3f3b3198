// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The files of csv_monitor and of the run's record.
#include "report/monitors.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "errors.h"

namespace deeptide::report {
namespace {

std::string folder() {
  const auto path = std::filesystem::path(testing::TempDir()) /
                    ("monitors_" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
  std::filesystem::remove_all(path);
  return path.string();
}

std::string read(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(CsvFiles, HoldOneNameEachWithAHeader) {
  const std::string path = folder();
  const CsvMonitorConfig config{.enabled = true, .output_path = path, .job_name = "job"};
  CsvFiles(config).write({{"Train/Samples/lr", 0.5, 8}});
  CsvFiles(config).write({{"Train/Samples/lr", 0.25, 16}, {"Train/Samples/train loss", 1e-9, 16}});  // goes on
  EXPECT_EQ(read(path + "/job/Train_Samples_lr.csv"), "step,lr\n8,0.5\n16,0.25\n");
  EXPECT_EQ(read(path + "/job/Train_Samples_train_loss.csv"), "step,train loss\n16,1e-09\n");
}

TEST(CsvFiles, SayWhichFolderCannotBeMade) {
  const std::string path = folder();
  std::ofstream(path) << "a file";
  const std::string error = error_of([&] { CsvFiles(CsvMonitorConfig{true, path, "job"}); });
  EXPECT_NE(error.find("csv_monitor: cannot make the folder '" + path), std::string::npos) << error;
  EXPECT_NE(error.find("output_path"), std::string::npos) << error;
}

TEST(RunRecord, IsALineForEachObjectAtOnce) {
  const std::string path = folder();
  RunRecord record({.enabled = true, .output_path = path, .job_name = "run"});
  record.write({{"kind", "start"}});
  record.write({{"kind", "step"}, {"text", "not UTF-8: \xff"}});
  std::istringstream lines(read(path + "/run/run.jsonl"));
  std::string first, second;
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_EQ(nlohmann::json::parse(first)["kind"], "start");
  EXPECT_EQ(nlohmann::json::parse(second)["kind"], "step");
}

}  // namespace
}  // namespace deeptide::report
