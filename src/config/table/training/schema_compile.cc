// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's compilation and generation: compile, hybrid_engine.
#include "config/table/schema_sections.h"

namespace deeptide::config {

namespace {

const char* const kFormer = "DeepSpeed no longer reads it; torch.compile is called by the program";

}  // namespace

std::vector<Key> compile_sections() {
  return {
      section("compile", "DeepCompile.",
              {
                  flag("deepcompile", false, "Use it."),
                  flag("free_activation", false, "Free activations early."),
                  integer("free_activation_threshold", 10'485'760, "Bytes from which on.").at_least(0),
                  flag("offload_activation", false, "Move activations to the CPU."),
                  flag("offload_activation_pin_memory", true, "Through page-locked memory."),
                  flag("offload_opt_states", false, "Move optimizer states to the CPU."),
                  flag("double_buffer", true, "Two buffers."),
                  flag("symmetric_memory", false, "Symmetric memory."),
                  flag("debug_log", false, "Log its passes."),
                  flag("offload_parameters", false, "Move parameters to the CPU."),
                  flag("sync_before_reduce", false, "Synchronise before reductions."),
                  flag("sync_after_reduce", false, "Synchronise after reductions."),
                  flag("sync_before_allgather", false, "Synchronise before gathers."),
                  flag("sync_after_allgather", false, "Synchronise after gathers."),
                  flag("keep_int_input_tensors", true, "Keep integer inputs."),
                  flag("keep_all_input_tensors", false, "Keep all inputs."),
                  list("passes", Kind::word, {}, "Passes: z1, z3, autosp, autotp."),
                  flag("enabled", {}, "Of DeepSpeed's former section.").never(kFormer),
                  flag("disable", {}, "Of DeepSpeed's former section.").never(kFormer),
                  word("backend", {}, "Of DeepSpeed's former section.").never(kFormer),
                  section("kwargs", "Of DeepSpeed's former section.", {}).leaves_open().never(kFormer),
              })
          .switched_by("deepcompile")
          .later(),
      section("hybrid_engine", "Training and generation in turns.",
              {
                  enabled(),
                  integer("max_out_tokens", 512, "Longest output.").at_least(1),
                  integer("inference_tp_size", 1, "Ranks that share a layer.").at_least(1),
                  flag("release_inference_cache", false, "Free the cache after generation."),
                  flag("pin_parameters", true, "Page-locked parameters."),
                  integer("tp_gather_partition_size", 8, "Layers gathered at once.").at_least(1),
                  flag("enable_cuda_graph", false, "CUDA graphs."),
              })
          .switched_by("enabled")
          .later("model.generate works between training steps"),
  };
}

}  // namespace deeptide::config
