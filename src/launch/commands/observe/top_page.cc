// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lays out what a job's hosts say as plain text.
#include "launch/commands/observe/top_page.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/libraries/nlohmann.h"
#include "base/text.h"

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

std::string ms_text(const json& step, const char* name) { return format("%10.1f", 1e3 * number(step, name)); }

/// The facts that all ranks share, told by the first one.
std::string head_text(const json& job) {
  std::string text =
      "job " + std::to_string(job.at("job").get<int64_t>()) + ": " + job.at("command").get<std::string>();
  text += format(" | %zu ranks, %.0f s\n", job.at("world").get<size_t>(), number(job, "age_s"));
  double tokens = 0.0;
  for (const json& rank : job.at("ranks")) {
    if (rank.contains("last_step")) tokens += number(rank["last_step"], "tokens");
  }
  for (const json& rank : job.at("ranks")) {
    if (rank.at("rank") != 0 || !rank.contains("last_step")) continue;
    const json& step = rank["last_step"];
    text += format("step %.0f | loss ", number(step, "step")) + value_text(step, "loss") + " | norm " +
            value_text(step, "norm") + " | lr " + value_text(step, "lr") +
            format(" | skipped %.0f | ", number(step, "skipped_steps"));
    const double total = number(step, "total_s");
    if (total > 0.0) text += format("%.4g samples/s", number(step, "train_batch") / total);
    if (total > 0.0 && tokens > 0.0) text += format(", %.5g tokens/s", tokens / total);
    text += "\n" + step.at("limit").get<std::string>() + "\n";
    return text;
  }
  return text + "no step has ended since this command looks\n\n";
}

std::string rank_text(const json& rank) {
  const std::string host = rank.at("host");
  std::string text = format("%5d %-14s %c ", rank.at("rank").get<int>(), host.empty() ? "here" : host.c_str(),
                            rank.at("process").get<std::string>().at(0));
  if (rank.contains("last_step")) {
    const json& step = rank["last_step"];
    for (const char* name : {"total_s", "computing_s", "waiting_s", "files_s", "data_s"}) text += ms_text(step, name);
    text += format(" %10s  ", bytes_text(static_cast<int64_t>(number(step, "memory_bytes"))).c_str());
  } else {
    text += format("%10s%10s%10s%10s%10s %10s  ", "-", "-", "-", "-", "-", "-");
  }
  text += format("%.0f ", number(rank, "step")) + rank.at("phase").get<std::string>();
  if (const std::string module = rank.at("module"); !module.empty()) text += " " + module;
  if (rank.contains("waiting")) {
    const json& wait = rank["waiting"];
    text += format(", waits %.1f s for ", number(wait, "waited_s")) + wait.at("operation").get<std::string>() + " " +
            wait.at("unit").get<std::string>();
  }
  return text + "\n";
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

std::string top_page(const json& job, size_t max_ranks) {
  std::string text = head_text(job);
  if (job.contains("slow_link")) {
    const json& link = job["slow_link"];
    text += format("slow link from rank %d to rank %d: ", link.at("from").get<int>(), link.at("to").get<int>()) +
            bytes_text(link.at("bytes_per_s").get<int64_t>()) + "/s, others " +
            bytes_text(link.at("others").get<int64_t>()) + "/s\n";
  }
  text += format("%5s %-14s %c %10s%10s%10s%10s%10s %10s  %s\n", "RANK", "HOST", 'S', "STEP ms", "COMPUTE", "WAIT",
                 "FILES", "DATA", "MEMORY", "IN");
  const auto ranks = chosen_ranks(job, max_ranks);
  for (const json* rank : ranks) text += rank_text(*rank);
  if (const size_t all = job.at("ranks").size(); all > ranks.size()) {
    text += format("and %zu ranks that compute for less long\n", all - ranks.size());
  }
  for (const json& host : job.at("silent")) text += "no answer from " + host.get<std::string>() + "\n";
  return text;
}

}  // namespace deeptide::launch
