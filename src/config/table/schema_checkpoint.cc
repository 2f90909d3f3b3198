// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's checkpoints: checkpoint, nebula, datastates_ckpt.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key writer_section() {
  return section("writer", "DeepSpeed's file writers.",
                 {
                     choice("type", "FAST", {"MOCK", "PYTHON", "FAST"}, "Which one.").ignoring_case(),
                     integer("io_buffer_size", 67'108'864, "Bytes of its buffer.").at_least(1),
                     flag("io_buffer_double", true, "Two buffers."),
                     flag("show_statistics", false, "Print its speed."),
                     choice("data_parallel", {}, {"REPLICA", "SOCKET", "MACHINE"}, "Who writes.").ignoring_case(),
                     flag("decoupled", false, "Write while training goes on."),
                     integer("io_multiplier", 1, "Writers for each file.").at_least(1),
                 })
      .never("there is one writer here, and it writes in large aligned requests");
}

}  // namespace

std::vector<Key> checkpoint_sections() {
  return {
      section("checkpoint", "How checkpoints are written and read.",
              {
                  choice("tag_validation", "Warn", {"Warn", "Ignore", "Fail"}, "When ranks' tags differ.")
                      .ignoring_case()
                      .never("a save whose ranks give different tags fails on every rank"),
                  flag("load_universal", false, "Load the universal form, for another number of ranks.")
                      .either("every checkpoint here loads for any number of ranks"),
                  flag("use_node_local_storage", false, "Every node writes its own part.").later(),
                  section("parallel_write", "Writing by several ranks.",
                          {flag("pipeline_stage", false, "Pipeline stages write their parts.")
                               .never("every rank writes its own part")}),
                  flag("checkpoint_serialization", true, "Use torch.save.").never("the format here is safetensors"),
                  writer_section(),
              }),
      section("nebula", "Azure's checkpoint service.",
              {
                  flag("enabled", false, "Use it."),
                  word("nebula_load_path", {}, "Load from here."),
                  flag("enable_nebula_load", true, "Load through it."),
                  word("persistent_storage_path", {}, "Store here."),
                  integer("persistent_time_interval", 100, "Seconds between copies.").at_least(1),
                  integer("num_of_version_in_retention", 2, "Versions kept.").at_least(1),
              })
          .switched_by("enabled")
          .later(),
      section("datastates_ckpt", "The DataStates checkpoint engine.",
              {number("host_cache_size", {}, "Its cache in host memory.").above(0)})
          .leaves_open()
          .when_present()
          .later(),
  };
}

}  // namespace deeptide::config
