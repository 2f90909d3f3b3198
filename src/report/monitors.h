// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes scalars to files: one CSV per name, and one JSONL that records the run.
#pragma once

#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/engine.h"

namespace deeptide::report {

/// Files as DeepSpeed's: output_path/job_name/Train_Samples_lr.csv with the columns "step" and "lr".
class CsvFiles {
 public:
  explicit CsvFiles(const CsvMonitorConfig& config);
  /// Errors: std::runtime_error naming the file.
  void write(const std::vector<MonitorEvent>& events) const;

 private:
  std::string folder_;
};

/// One JSON object a line, each with its "kind"; written through at once, so that a killed run leaves what it did.
class RunRecord {
 public:
  /// Errors: std::runtime_error if the folder cannot be made.
  explicit RunRecord(const JsonlMonitorConfig& config);
  void write(const nlohmann::json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace deeptide::report
