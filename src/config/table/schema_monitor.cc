// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's profiling, logging and monitors.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key enabled() { return flag("enabled", false, "Use it."); }

std::vector<Key> profilers() {
  return {
      section("flops_profiler", "Counts of a step's operations.",
              {
                  enabled(),
                  number("recompute_fwd_factor", 0.0, "Share of the forward pass computed again.").at_least(0),
                  integer("profile_step", 1, "The step to profile.").at_least(0),
                  integer("module_depth", -1, "Depth shown; -1: all.").at_least(-1),
                  integer("top_modules", 1, "Modules shown at each depth.").at_least(1),
                  flag("detailed", true, "The whole table."),
                  word("output_file", {}, "Write it here.").derives("standard output"),
              })
          .switched_by("enabled")
          .never(kNotSeen),
      section("comms_logger", "Log of collectives.",
              {
                  enabled(),
                  flag("verbose", false, "Each one."),
                  flag("prof_all", true, "All kinds."),
                  flag("debug", false, "With the caller."),
                  list("prof_ops", Kind::word, words({}), "Only these kinds."),
              })
          .switched_by("enabled")
          .never(kNotSeen),
      section("timers", "Timers of the engine.",
              {section("throughput", "The throughput timer.",
                       {
                           flag("enabled", true, "Measure throughput."),
                           flag("synchronized", true, "Synchronise the device first."),
                       })
                   .never("progress lines take the time between two steps, which waits for nothing")}),
  };
}

std::vector<Key> monitors() {
  constexpr const char* kJob = "DeepSpeedJobName";
  return {
      section("tensorboard", "Scalars to TensorBoard.",
              {enabled(), word("output_path", "", "Folder."), word("job_name", kJob, "Name of the run.")})
          .switched_by("enabled")
          .never(kNotSeen),
      section("csv_monitor", "Scalars to CSV files.",
              {enabled(), word("output_path", "", "Folder."), word("job_name", kJob, "Name of the run.")})
          .switched_by("enabled")
          .never(kNotSeen),
      section(
          "wandb", "Scalars to Weights & Biases.",
          {enabled(), word("group", {}, "Group."), word("team", {}, "Team."), word("project", "deepspeed", "Project.")})
          .switched_by("enabled")
          .never(kNotSeen),
      section("comet", "Scalars to Comet.",
              {enabled(), integer("samples_log_interval", 100, "Samples between points.").at_least(1),
               word("project", {}, "Project."), word("workspace", {}, "Workspace."), word("api_key", {}, "Key."),
               word("experiment_name", {}, "Name."), word("experiment_key", {}, "Id."), flag("online", {}, "Online."),
               word("mode", {}, "Mode.")})
          .switched_by("enabled")
          .never(kNotSeen),
  };
}

}  // namespace

std::vector<Key> monitor_sections() {
  std::vector<Key> keys = profilers();
  const std::vector<Key> more = monitors();
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

}  // namespace deeptide::config
