// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's profiling, logging and monitors.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key flops_profiler_section() {
  return section("flops_profiler",
                 "Counts of one step's operations: by module from Python, by kind of operator from C++.",
                 {
                     enabled().into(&FlopsProfilerConfig::enabled),
                     number("recompute_fwd_factor", 0.0,
                            "Share of the forward pass that a checkpointed backward computes again; it is not counted "
                            "as work of the model.")
                         .at_least(0)
                         .into(&FlopsProfilerConfig::recompute_fwd_factor),
                     integer("profile_step", 1, "The step to profile, from 1.")
                         .at_least(0)
                         .into(&FlopsProfilerConfig::profile_step),
                     integer("module_depth", -1, "Depth shown; -1: all.")
                         .at_least(-1)
                         .into(&FlopsProfilerConfig::module_depth),
                     integer("top_modules", 1, "Modules shown at each depth.")
                         .at_least(1)
                         .into(&FlopsProfilerConfig::top_modules),
                     flag("detailed", true, "The whole table.").into(&FlopsProfilerConfig::detailed),
                     word("output_file", {}, "Write it here; a name that ends in .json holds JSON.")
                         .derives("standard output")
                         .into(&FlopsProfilerConfig::output_file),
                 })
      .switched_by("enabled");
}

std::vector<Key> profilers() {
  return {
      flops_profiler_section(),
      section("comms_logger", "Log of the engine's collectives: volume, latency, bandwidth, and ranks that are late.",
              {
                  enabled().into(&CommsLoggerConfig::enabled),
                  flag("verbose", false, "A line for each one on rank 0.").into(&CommsLoggerConfig::verbose),
                  flag("prof_all", true, "All kinds.").into(&CommsLoggerConfig::prof_all),
                  flag("debug", false, "With the caller.")
                      .never("each line names the channel, which tells what asked for it"),
                  list("prof_ops", Kind::word, words({}), "Without prof_all: only these kinds, such as all_gather.")
                      .into(&CommsLoggerConfig::prof_ops),
              })
          .switched_by("enabled"),
      section("timers", "Timers of the engine.",
              {section("throughput", "The throughput timer.",
                       {
                           flag("enabled", true, "Measure throughput."),
                           flag("synchronized", true, "Synchronise the device first."),
                       })
                   .never("progress lines take the time between two steps, which waits for nothing")}),
  };
}

constexpr const char* kJob = "DeepSpeedJobName";

std::vector<Key> monitors() {
  return {
      section("tensorboard", "Scalars to TensorBoard, on rank 0 of a program in Python.",
              {
                  enabled().into(&TensorboardConfig::enabled),
                  word("output_path", "", "Folder.").into(&TensorboardConfig::output_path),
                  word("job_name", kJob, "Name of the run: a folder in it.").into(&TensorboardConfig::job_name),
              })
          .switched_by("enabled"),
      section("csv_monitor", "Scalars to CSV files, one per name, on rank 0.",
              {
                  enabled().into(&CsvMonitorConfig::enabled),
                  word("output_path", "", "Folder.").into(&CsvMonitorConfig::output_path),
                  word("job_name", kJob, "Name of the run: a folder in it.").into(&CsvMonitorConfig::job_name),
              })
          .switched_by("enabled"),
      section("wandb", "Scalars to Weights & Biases, on rank 0 of a program in Python.",
              {
                  enabled().into(&WandbConfig::enabled),
                  word("group", {}, "Group.").into(&WandbConfig::group),
                  word("team", {}, "Team.").into(&WandbConfig::team),
                  word("project", "deepspeed", "Project.").into(&WandbConfig::project),
              })
          .switched_by("enabled"),
      section("comet", "Scalars to Comet, on rank 0 of a program in Python.",
              {
                  enabled().into(&CometConfig::enabled),
                  integer("samples_log_interval", 100, "Samples between two points of a name.")
                      .at_least(1)
                      .into(&CometConfig::samples_log_interval),
                  word("project", {}, "Project.").into(&CometConfig::project),
                  word("workspace", {}, "Workspace.").into(&CometConfig::workspace),
                  word("api_key", {}, "Key.").into(&CometConfig::api_key),
                  word("experiment_name", {}, "Name.").into(&CometConfig::experiment_name),
                  word("experiment_key", {}, "Id.").into(&CometConfig::experiment_key),
                  flag("online", {}, "Online; false: files of Comet's own.").into(&CometConfig::online),
                  word("mode", {}, "get, create or get_or_create.").into(&CometConfig::mode),
              })
          .switched_by("enabled"),
  };
}

}  // namespace

std::vector<Key> monitor_sections() {
  std::vector<Key> keys = profilers();
  const std::vector<Key> more = monitors();
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

std::vector<Key> own_monitor_sections() {
  return {
      section("jsonl_monitor",
              "A record of the run for `deeptide report`, on rank 0: scalars, times, memory, and what was decided.",
              {
                  enabled().into(&JsonlMonitorConfig::enabled),
                  word("output_path", "runs", "Folder.").into(&JsonlMonitorConfig::output_path),
                  word("job_name", "run", "Name of the run: a folder in it, which holds run.jsonl.")
                      .into(&JsonlMonitorConfig::job_name),
              })
          .switched_by("enabled"),
      section("timeline", "What every rank does, as files for Perfetto; `deeptide trace FOLDER` joins them.",
              {
                  enabled().into(&TimelineConfig::enabled),
                  word("output_path", "timeline", "Folder.").into(&TimelineConfig::output_path),
                  integer("start_step", 3, "The first step that is recorded.")
                      .at_least(1)
                      .into(&TimelineConfig::start_step),
                  integer("num_steps", 3, "Steps that are recorded.").at_least(1).into(&TimelineConfig::num_steps),
              })
          .switched_by("enabled"),
  };
}

}  // namespace deeptide::config
