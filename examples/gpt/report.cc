// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Numbers into words: one line redrawn on a terminal, JSON lines, the table of bytes.
#include "report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace gpt {
namespace {

using nlohmann::json;

constexpr double kQuietSeconds = 10.0;  // between lines when nobody watches a terminal
constexpr double kRecent = 0.9;         // weight of the past in the speed shown
constexpr int kBarWidth = 10;
constexpr size_t kSampleWidth = 100;

double seconds_of(std::chrono::steady_clock::duration time) { return std::chrono::duration<double>(time).count(); }

// Memory of this process; "VmHWM": at its peak.
int64_t resident_bytes(const std::string& field = "VmRSS") {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == field + ":" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

std::string megabytes(int64_t bytes) { return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6); }

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string rule() {
  std::string line;
  for (int i = 0; i < 78; ++i) line += "─";
  return line;
}

json as_json(const Run& run) {
  return {{"parameters", run.parameters},
          {"ranks", run.ranks},
          {"stage", run.stage},
          {"dtype", run.dtype},
          {"tokens_per_step", run.tokens_per_step},
          {"total_steps", run.total_steps}};
}

// Indented; a model may write any byte, and a terminal obeys some, so only ASCII and line ends stay as they are.
std::string quoted(const std::string& text) {
  const std::string upto = text.substr(0, text.find_last_not_of(" \t\n") + 1);  // a small model may end in blanks
  std::istringstream lines(upto.substr(std::min(upto.find_first_not_of('\n'), upto.size())));
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    result += "  | ";
    for (const char byte : line.substr(0, kSampleWidth)) {
      if (byte == '\t') {
        result += "    ";
      } else {
        result += byte >= 32 && byte < 127 ? byte : '?';
      }
    }
    result += "\n";
  }
  return result;
}

// Bytes on one rank by role, as the engine predicted and as it measured them.
std::string memory_table(const std::vector<deeptide::MemoryLine>& lines) {
  std::string table = fmt::format("{:<20}{:>14}{:>14}\n", "bytes per rank", "predicted", "measured");
  for (const auto& line : lines) {
    table += fmt::format("{:<20}{:>14}{:>14}\n", text(line.role), megabytes(line.predicted_bytes),
                         megabytes(line.measured_bytes));
  }
  return table;
}

}  // namespace

Report::Report(Run run, std::filesystem::path out, int64_t start, int rank, bool print_losses)
    : run_(std::move(run)),
      out_(std::move(out)),
      start_(start),
      shown_(rank == 0),
      bare_(print_losses),
      terminal_(isatty(STDOUT_FILENO) && !print_losses),
      began_(Clock::now()),
      last_step_(began_),
      last_line_(began_) {
  if (shown_) open_losses();
}

// Keeps what an earlier part of this run wrote, up to the checkpoint it goes on from.
void Report::open_losses() {
  std::filesystem::create_directories(out_);
  const auto path = out_ / "losses.jsonl";
  std::vector<std::string> kept;
  if (start_ > 0) {
    std::ifstream earlier(path);
    std::string line;
    std::getline(earlier, line);
    while (std::getline(earlier, line)) {
      const json value = json::parse(line);
      if (value.at("step") > start_) continue;
      kept.push_back(line);
      if (value.contains("held_out")) held_out_losses_.push_back(value["held_out"]);
    }
  }
  losses_.open(path);
  losses_ << as_json(run_).dump() << "\n";
  for (const std::string& line : kept) losses_ << line << "\n";
  losses_.flush();
}

void Report::step(int64_t step, double loss, double lr) {
  if (!shown_) return;
  const auto now = Clock::now();
  const double seconds = seconds_of(now - last_step_);
  last_step_ = now;
  const double past = seconds_per_step_ > 0 ? kRecent : 0.0;
  seconds_per_step_ = past * seconds_per_step_ + (1 - past) * seconds;
  const int64_t memory = resident_bytes();
  const json record = {{"step", step}, {"loss", loss}, {"lr", lr}, {"seconds", seconds}, {"rss_bytes", memory}};
  losses_ << record.dump() << std::endl;
  if (bare_) {
    std::cout << fmt::format("step {} loss {:.8f}", step, loss) << std::endl;
  } else {
    show_progress(step, loss, memory, now);
  }
}

void Report::show_progress(int64_t step, double loss, int64_t memory_bytes, Clock::time_point now) {
  if (!terminal_ && seconds_of(now - last_line_) < kQuietSeconds && step != start_ + 1) return;
  last_line_ = now;
  const auto speed = static_cast<double>(run_.tokens_per_step) / seconds_per_step_;
  const auto left = static_cast<double>(run_.total_steps - step) * seconds_per_step_;
  const std::string figures = fmt::format("step {}/{} | {} left | loss {:.3f} | {:.0f} tokens/s | {}", step,
                                          run_.total_steps, duration(left), loss, speed, megabytes(memory_bytes));
  if (!terminal_) {
    std::cout << figures << std::endl;
    return;
  }
  const auto full = static_cast<size_t>(kBarWidth * step / std::max<int64_t>(run_.total_steps, 1));
  std::cout << "\r\033[K[" << std::string(full, '#') << std::string(kBarWidth - full, '.') << "] " << figures
            << std::flush;
}

void Report::held_out(int64_t step, double loss) {
  if (!shown_) return;
  losses_ << json{{"step", step}, {"held_out", loss}}.dump() << std::endl;
  held_out_losses_.push_back(loss);
  say(bare_ ? fmt::format("step {} held_out {:.8f}", step, loss)
            : fmt::format("step {}: held-out loss {:.3f}", step, loss));
  last_step_ = Clock::now();  // an evaluation is no part of a step's time
}

void Report::say(const std::string& text) {
  if (shown_) std::cout << (terminal_ ? "\r\033[K" : "") << text << std::endl;
}

void Report::end_of_training(int64_t step) {
  steps_done_ = step - start_;
  seconds_ = seconds_of(Clock::now() - began_);
  losses_.close();
}

void Report::summary(const std::string& sample, const std::vector<deeptide::MemoryLine>& memory,
                     const std::string& checkpoint) {
  if (!shown_) return;
  std::cout << rule() << "\n"
            << fmt::format("A GPT with {:.1f} M parameters: {} ranks, ZeRO stage {}, {}\n",
                           static_cast<double>(run_.parameters) / 1e6, run_.ranks, run_.stage, run_.dtype)
            << fmt::format("{} steps in {} (min:s), {:.0f} tokens/s with evaluation and saving\n\n", steps_done_,
                           duration(seconds_), static_cast<double>(steps_done_ * run_.tokens_per_step) / seconds_)
            << (start_ + steps_done_ < run_.total_steps
                    ? fmt::format("Its time was up before step {}: --resume goes on, and it writes better\n\n",
                                  run_.total_steps)
                    : "")
            << fmt::format("Held-out loss: {:.3f} before, {:.3f} after (nats per byte; pure guessing is 5.545)\n\n",
                           held_out_losses_.front(), held_out_losses_.back())
            << fmt::format("Prompted with \"def\", at temperature {}, it writes:\n", kTemperature) << quoted(sample)
            << "\n"
            << memory_table(memory)
            << fmt::format("peak memory of this process (torch and data included): {}\n\n",
                           megabytes(resident_bytes("VmHWM")))
            << "Losses:      " << (out_ / "losses.jsonl").string() << " (plot.py draws the curve)\n"
            << "Checkpoint:  " << checkpoint << "\n"
            << rule() << std::endl;
}

}  // namespace gpt
