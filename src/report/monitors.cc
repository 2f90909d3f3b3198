// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Appends to the files of csv_monitor and deeptide.jsonl_monitor.
#include "report/monitors.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"

namespace deeptide::report {
namespace {

std::string make_folder(const char* section, const std::string& path, const std::string& job) {
  const std::filesystem::path folder = std::filesystem::path(path) / job;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error) return folder.string();
  throw std::runtime_error(
      format_text("{}: cannot make the folder '{}': {}; set output_path to one that can be written", section,
                  folder.string(), error.message()));
}

}  // namespace

CsvFiles::CsvFiles(const CsvMonitorConfig& config)
    : folder_(make_folder("csv_monitor", config.output_path, config.job_name)) {}

void CsvFiles::write(const std::vector<MonitorEvent>& events) const {
  for (const MonitorEvent& event : events) {
    std::string name = event.name;
    for (char& c : name) c = c == '/' || c == ' ' ? '_' : c;
    const std::string path = folder_ + "/" + name + ".csv";
    const bool is_new = !std::filesystem::exists(path);
    std::ofstream file(path, std::ios::app);
    if (is_new) file << "step," << event.name.substr(event.name.rfind('/') + 1) << "\n";
    file << event.x << "," << format_text("{}", event.value) << "\n";
    file.close();
    if (!file) throw std::runtime_error("csv_monitor: cannot write '" + path + "'; check the folder and its space");
  }
}

RunRecord::RunRecord(const JsonlMonitorConfig& config)
    : path_(make_folder("deeptide.jsonl_monitor", config.output_path, config.job_name) + "/run.jsonl"),
      file_(path_, std::ios::app) {}

void RunRecord::write(const nlohmann::json& line) {
  file_ << write_json(line, -1, nlohmann::json::error_handler_t::replace) << "\n" << std::flush;
  if (file_) return;
  throw std::runtime_error("deeptide.jsonl_monitor: cannot write '" + path_ + "'; check the folder and its space");
}

}  // namespace deeptide::report
