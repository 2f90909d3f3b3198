// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide trace`: records some steps of a live job, and joins the ranks' timelines.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "base/libraries/nlohmann.h"
#include "launch/commands/commands.h"
#include "launch/machine/python_module.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"
#include "launch/watch/job_socket.h"

namespace deeptide::launch {
namespace {

namespace fs = std::filesystem;

constexpr int kTraceTimeout_s = 5;
constexpr size_t kLongestFolder = 255;
constexpr auto kTracePause = std::chrono::milliseconds(200);

struct Wanted {
  std::string of;  // a job's id, or a folder with timelines
  std::string output;
  int64_t steps = 5;
  bool stop = false;
  bool no_wait = false;
};

bool is_id(const std::string& text) {
  return text.find_first_not_of("0123456789") == std::string::npos && !fs::is_directory(text);
}

/// How many ranks have written; all: those of the world that answer.
std::pair<size_t, size_t> count_written(const nlohmann::json& job, uint64_t number) {
  size_t written = 0;
  for (const auto& rank : job.at("ranks")) written += rank.at("traced").get<uint64_t>() >= number ? 1 : 0;
  return {written, job.at("ranks").size()};
}

/// Returns when all ranks have written. Errors: UsageError if the job ends first.
void wait_for_files(const LiveJob& job, uint64_t number, const std::string& folder) {
  while (true) {
    std::this_thread::sleep_for(kTracePause);
    const std::string answer = ask(job, "top", kTraceTimeout_s);
    if (answer.empty()) {
      throw UsageError("trace: job " + job.id + " ended before all ranks had written; 'deeptide trace " + folder +
                       "' joins what there is if all ranks' files are");
    }
    const auto [written, all] = count_written(read_json(answer), number);
    if (all > 0 && written == all) return;
  }
}

int record(const Wanted& wanted) {
  const LiveJob job = find_job(wanted.of);
  const std::string folder =
      fs::absolute(wanted.output.empty() ? "timeline-" + job.id : wanted.output).lexically_normal().string();
  if (folder.size() > kLongestFolder) throw UsageError("trace: the folder's path exceeds 255 bytes: " + folder);
  const int64_t steps = wanted.stop ? 0 : wanted.steps;
  const std::string number = ask(job, "trace " + std::to_string(steps) + " " + folder, kTraceTimeout_s);
  if (number.empty()) throw UsageError("job " + job.id + " did not answer: it has ended, or its launcher is stopped");
  if (wanted.stop) {
    if (!wanted.no_wait) wait_for_files(job, std::stoull(number), folder);
    std::printf("job %s has ended its timeline; 'deeptide trace FOLDER' joins its files\n", job.id.c_str());
    return 0;
  }
  std::printf("job %s writes the next %lld steps to %s\n", job.id.c_str(), static_cast<long long>(steps),
              folder.c_str());
  std::fflush(stdout);
  if (wanted.no_wait) return 0;
  wait_for_files(job, std::stoull(number), folder);
  become_module("deeptide._commands.trace", {folder});
}

}  // namespace

int run_trace(const Arguments& arguments) {
  CLI::App app(
      "Records the next steps of a live job as one trace of all ranks, for ui.perfetto.dev; or joins the "
      "timelines in a folder, which a run with \"deeptide.timeline\" has written.",
      "deeptide trace");
  Wanted wanted;
  app.add_option("of", wanted.of, "The job's id from 'deeptide ps', optional if only one job is live; or a folder");
  app.add_option("-o,--output", wanted.output,
                 "Of a job: the folder for its timelines, timeline-JOB unless given, on every host; of a folder: the "
                 "joined file, trace.json in it unless given");
  app.add_option("--steps", wanted.steps, "Steps to record")->check(CLI::PositiveNumber);
  app.add_flag("--stop", wanted.stop, "End the timeline that the job records now, and wait for its files");
  app.add_flag("--no-wait", wanted.no_wait, "Do not wait for the steps, and join nothing");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  if (is_id(wanted.of)) return record(wanted);
  Arguments rest{wanted.of};
  if (!wanted.output.empty()) rest.insert(rest.end(), {"--output", wanted.output});
  become_module("deeptide._commands.trace", rest);
}

}  // namespace deeptide::launch
