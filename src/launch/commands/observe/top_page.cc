// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lays out what a job's hosts say as plain text.
#include "launch/commands/observe/top_page.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/libraries/nlohmann.h"
#include "base/text.h"
#include "launch/system/terminal.h"

namespace deeptide::launch {
namespace {

using nlohmann::json;

template <typename... Values>
std::string format(const char* how, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, how, values...);
  return text;
}

double number(const json& from, const char* name) {
  const auto found = from.find(name);
  return found == from.end() || !found->is_number() ? 0.0 : found->get<double>();
}

/// "-" for what the rank does not know.
std::string value_text(const json& step, const char* name) {
  return step.at(name).is_null() ? "-" : format("%.5g", number(step, name));
}

constexpr size_t kOtherLines = 7;    // of the page: above and below the ranks
constexpr size_t kFewColumns = 110;  // narrower: a rank has a second line, for what it does

/// Widths of the table's columns, in characters.
struct Widths {
  int rank, host, time, memory;
};
constexpr Widths kWide = {5, 14, 10, 10}, kNarrow = {5, 10, 9, 10};

/// A line that may pass the width, with its rest in further lines.
std::string fitted(const std::string& line, size_t columns) {
  return (columns == 0 || line.size() <= columns ? line : wrapped(line, columns, 2, 0)) + "\n";
}

std::string ms_text(const json& step, const char* name, int width) {
  return format("%*.1f", width, 1e3 * number(step, name));
}

/// The facts that all ranks share, told by the first one.
std::string head_text(const json& job, size_t columns) {
  std::string text =
      "job " + std::to_string(job.at("job").get<int64_t>()) + ": " + job.at("command").get<std::string>();
  text = fitted(text + format(" | %zu ranks, %.0f s", job.at("world").get<size_t>(), number(job, "age_s")), columns);
  double tokens = 0.0;
  for (const json& rank : job.at("ranks")) {
    if (rank.contains("last_step")) tokens += number(rank["last_step"], "tokens");
  }
  for (const json& rank : job.at("ranks")) {
    if (rank.at("rank") != 0 || !rank.contains("last_step")) continue;
    const json& step = rank["last_step"];
    std::string line = format("step %.0f | loss ", number(step, "step")) + value_text(step, "loss") + " | norm " +
                       value_text(step, "norm") + " | lr " + value_text(step, "lr") +
                       format(" | skipped %.0f | ", number(step, "skipped_steps"));
    const double total = number(step, "total_s");
    if (total > 0.0) line += format("%.4g samples/s", number(step, "train_batch") / total);
    if (total > 0.0 && tokens > 0.0) line += format(", %.5g tokens/s", tokens / total);
    return text + fitted(line, columns) + fitted(step.at("limit").get<std::string>(), columns);
  }
  return text + "no step has ended since this command looks\n\n";
}

/// Names the phase and module that the rank is in, and the wait, if any.
std::string activity_text(const json& rank) {
  std::string text = format("%.0f ", number(rank, "step")) + rank.at("phase").get<std::string>();
  if (const std::string module = rank.at("module"); !module.empty()) text += " " + module;
  if (rank.contains("waiting")) {
    const json& wait = rank["waiting"];
    text += format(", waits %.1f s for ", number(wait, "waited_s")) + wait.at("operation").get<std::string>() + " " +
            wait.at("unit").get<std::string>();
  }
  return text;
}

std::string rank_text(const json& rank, size_t columns) {
  const bool is_narrow = columns > 0 && columns < kFewColumns;
  const Widths width = is_narrow ? kNarrow : kWide;
  std::string host = rank.at("host");
  if (host.empty()) host = "here";
  if (is_narrow) host.resize(std::min(host.size(), static_cast<size_t>(width.host)));
  std::string text = format("%*d %-*s %c ", width.rank, rank.at("rank").get<int>(), width.host, host.c_str(),
                            rank.at("process").get<std::string>().at(0));
  const bool has_step = rank.contains("last_step");
  for (const char* name : {"total_s", "computing_s", "waiting_s", "files_s", "data_s"}) {
    text += has_step ? ms_text(rank["last_step"], name, width.time) : format("%*s", width.time, "-");
  }
  const std::string memory =
      has_step ? bytes_text(static_cast<int64_t>(number(rank["last_step"], "memory_bytes"))) : "-";
  text += format(" %*s  ", width.memory, memory.c_str());
  if (!is_narrow) return text + activity_text(rank) + "\n";
  std::string below = std::string(static_cast<size_t>(width.rank) + 1, ' ') + activity_text(rank);
  below.resize(std::min(below.size(), columns));
  return text + "\n" + below + "\n";
}

/// The ranks to show, in order. Of too many, those that compute longest: others wait for them.
std::vector<const json*> chosen_ranks(const json& job, size_t max_ranks) {
  std::vector<const json*> ranks;
  for (const json& rank : job.at("ranks")) ranks.push_back(&rank);
  if (ranks.size() <= max_ranks) return ranks;
  const auto computing = [](const json* rank) {
    return rank->contains("last_step") ? number(rank->at("last_step"), "computing_s") : 0.0;
  };
  std::stable_sort(ranks.begin(), ranks.end(), [&](auto* a, auto* b) { return computing(a) > computing(b); });
  ranks.resize(max_ranks);
  std::sort(ranks.begin(), ranks.end(), [](auto* a, auto* b) { return a->at("rank") < b->at("rank"); });
  return ranks;
}

}  // namespace

std::string top_page(const json& job, size_t rows, size_t columns) {
  std::string text = head_text(job, columns);
  if (job.contains("slow_link")) {
    const json& link = job["slow_link"];
    const std::string line =
        format("slow link from rank %d to rank %d: ", link.at("from").get<int>(), link.at("to").get<int>()) +
        bytes_text(link.at("bytes_per_s").get<int64_t>()) + "/s, others " +
        bytes_text(link.at("others").get<int64_t>()) + "/s";
    text += fitted(line, columns);
  }
  const bool is_narrow = columns > 0 && columns < kFewColumns;
  const Widths w = is_narrow ? kNarrow : kWide;
  text +=
      format("%*s %-*s %c %*s%*s%*s%*s%*s %*s  %s\n", w.rank, "RANK", w.host, "HOST", 'S', w.time, "STEP ms", w.time,
             "COMPUTE", w.time, "WAIT", w.time, "FILES", w.time, "DATA", w.memory, "MEMORY", is_narrow ? "" : "IN");
  const size_t left = std::max(rows, kOtherLines + 2) - kOtherLines;
  const auto ranks = chosen_ranks(job, rows == 0 ? SIZE_MAX : is_narrow ? left / 2 : left);
  for (const json* rank : ranks) text += rank_text(*rank, columns);
  if (const size_t all = job.at("ranks").size(); all > ranks.size()) {
    text += format("and %zu ranks that compute for less long\n", all - ranks.size());
  }
  for (const json& host : job.at("silent")) text += "no answer from " + host.get<std::string>() + "\n";
  return text;
}

}  // namespace deeptide::launch
