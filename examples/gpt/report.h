// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Shows and writes down rank 0's view of a run: progress, the losses of every step, the summary. The twin of report.py.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "deeptide/engine.h"

namespace gpt {

inline constexpr double kTemperature = 0.5;  // of the sample at the end: likely bytes, and not only the likeliest

/// The facts that stay the same during a run; the first line of losses.jsonl.
struct Run {
  int64_t parameters = 0;
  int ranks = 1;
  int stage = 0;
  std::string dtype;
  int64_t tokens_per_step = 0;
  int64_t total_steps = 0;
};

/// Progress on a terminal, a line now and then without one, bare losses with `print_losses`; nothing unless rank 0.
class Report {
 public:
  Report(Run run, std::filesystem::path out, int64_t start, int rank, bool print_losses);

  void step(int64_t step, double loss, double lr);
  void held_out(int64_t step, double loss);
  void say(const std::string& text);
  void end_of_training(int64_t step);
  /// Prints the page that one would show a friend.
  void summary(const std::string& sample, const std::vector<deeptide::MemoryLine>& memory,
               const std::string& checkpoint);

 private:
  using Clock = std::chrono::steady_clock;

  void open_losses();
  void show_progress(int64_t step, double loss, int64_t memory_bytes, Clock::time_point now);

  Run run_;
  std::filesystem::path out_;
  int64_t start_, steps_done_ = 0;
  bool shown_, bare_, terminal_;
  double seconds_per_step_ = 0.0;
  double seconds_ = 0.0;
  std::vector<double> held_out_losses_;
  std::ofstream losses_;
  Clock::time_point began_, last_step_, last_line_;
};

}  // namespace gpt
