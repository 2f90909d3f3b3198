// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints the end of a failed job so that the cause is the last line.
#include "launch/output/failure_report.h"

#include <signal.h>

#include <algorithm>
#include <cctype>
#include <string_view>

namespace deeptide::launch {
namespace {

constexpr int kExitLostHost = 255;  // as ssh reports a failed connection
constexpr size_t kLongestError = 300;
constexpr std::chrono::seconds kSettleTime{1};  // simultaneous ends may be reported in any order

// True for signals that a lost peer does not cause. An abort may be the reaction to a broken connection.
bool is_cause(const ExitStatus& status) {
  constexpr int kCauses[] = {SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  return std::find(std::begin(kCauses), std::end(kCauses), status.signal) != std::end(kCauses);
}

// Matches `ValueError: text`, `package.Error: text`, or a bare `KeyboardInterrupt`.
bool is_exception_line(const std::string& line) {
  const std::string name = line.substr(0, line.find(':'));
  const bool word =
      !name.empty() && std::isalpha(static_cast<unsigned char>(name[0])) &&
      std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.'; });
  return word && (line.size() == name.size() || line.compare(name.size(), 2, ": ") == 0);
}

std::string without_numbers(const std::string& text) {
  std::string key;
  for (char c : text) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c));
    if (!digit) {
      key += c;
    } else if (key.empty() || key.back() != '#') {
      key += '#';
    }
  }
  return key;
}

std::string named(int rank, const std::string& place, const std::string& host) {
  return "rank " + std::to_string(rank) + place + (host.empty() ? "" : " on " + host);
}

std::string named_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + join_ranges(ranks);
}

void print_tail(JobOutput& output, int rank) {
  const auto& lines = output.tail(rank);
  const std::string& log = output.log(rank);
  if (lines.empty() || (log.empty() && output.num_ranks() == 1)) return;  // the only rank's lines are above
  output.say(LogLevel::error,
             "last lines of rank " + std::to_string(rank) + (log.empty() ? "" : " (full log: " + log + ")") + ":");
  for (const std::string& line : lines) output.print("  " + line);
}

}  // namespace

void FailureReport::on_exit(int rank, const std::string& host, const ExitStatus& status, size_t num_running,
                            const std::string& place) {
  if (!status.failed()) {
    if (num_running > 0 && !failed()) ended_early_.push_back(rank);
    return;
  }
  failed_.push_back(rank);
  const bool later = first_ && Clock::now() - first_known_ > kSettleTime;
  if (first_ && (later || is_cause(first_->status) || !is_cause(status))) return;
  if (!first_) first_known_ = Clock::now();
  first_ = Failure{rank, host, place, status, first_ ? true : num_running > 0};
}

void FailureReport::on_lost_host(const std::string& host, const std::string& text) {
  if (failed()) return;
  lost_host_ = host;
  lost_text_ = text;
}

int FailureReport::exit_code() const {
  if (!lost_host_.empty()) return kExitLostHost;
  return first_ ? first_->status.exit_code() : 0;
}

std::string FailureReport::verdict() const {
  std::string text = lost_host_.empty() ? named(first_->rank, first_->place, first_->host) + " " + first_->status.text()
                                        : "host " + lost_host_ + " " + lost_text_;
  if (!lost_host_.empty() || first_->others_running) text += "; the others were stopped";
  if (!ended_early_.empty()) {
    text += " (" + named_ranks(ended_early_) + " had already ended with code 0)";
  }
  return text;
}

void FailureReport::print(JobOutput& output) const {
  if (!failed()) return;
  std::map<int, std::string> errors;
  for (int rank : failed_) {
    if (const auto error = last_error(output.tail(rank))) errors[rank] = *error;
  }
  if (lost_host_.empty()) print_tail(output, first_->rank);
  for (const SameError& same : group_errors(errors)) {
    if (errors.size() == 1 && lost_host_.empty() && failed_.size() == 1) break;  // the lines above show it
    const char* verb = same.ranks.size() > 1 ? " report: " : " reports: ";
    output.say(LogLevel::error, named_ranks(same.ranks) + verb + same.text);
  }
  output.say(LogLevel::critical, verdict());
}

std::optional<std::string> last_error(const std::deque<std::string>& lines) {
  for (size_t i = lines.size(); i-- > 0;) {
    const std::string& line = lines[i];
    constexpr std::string_view kWhat = "  what():  ";
    if (line.compare(0, kWhat.size(), kWhat) == 0) return line.substr(kWhat.size(), kLongestError);
    constexpr std::string_view kTerminate = "terminate called ";
    if (line.compare(0, kTerminate.size(), kTerminate) == 0) return line.substr(0, kLongestError);
    // The exception of a traceback follows an indented line of source, or of caret marks.
    if (is_exception_line(line) && i > 0 && lines[i - 1].compare(0, 4, "    ") == 0) {
      return line.substr(0, kLongestError);
    }
  }
  return std::nullopt;
}

std::vector<SameError> group_errors(const std::map<int, std::string>& errors) {
  std::vector<SameError> groups;
  for (const auto& [rank, text] : errors) {
    const auto same = std::find_if(groups.begin(), groups.end(), [&error = text](const SameError& group) {
      return without_numbers(group.text) == without_numbers(error);
    });
    if (same == groups.end()) {
      groups.push_back({text, {rank}});
    } else {
      same->ranks.push_back(rank);
    }
  }
  return groups;
}

std::string join_ranges(const std::vector<int>& numbers) {
  std::string joined;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    joined += (joined.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (last > i) joined += (last > i + 1 ? "-" : ", ") + std::to_string(numbers[last]);
    i = last + 1;
  }
  return joined;
}

}  // namespace deeptide::launch
