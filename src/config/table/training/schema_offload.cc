// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's placement of states: offload_param, offload_optimizer, deeptide.placement, zenflow.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

const JsonValue kNone(std::string_view("none"));

Key device() {
  return choice<OffloadDevice>(
      "device", OffloadDevice::none,
      {{"none", OffloadDevice::none}, {"cpu", OffloadDevice::cpu}, {"nvme", OffloadDevice::nvme}},
      "Where to: \"cpu\", the host's memory, is where a CPU engine keeps them anyway; \"nvme\": files.");
}

Key nvme_path() {
  return list("nvme_path", Kind::word, {},  // Accelerate writes null where none was given
              "Folder of the files, or several, over which blocks are striped.")
      .or_one();
}

Key pin_memory() {
  return flag("pin_memory", true, "Page-locked buffers.")
      .either("what crosses between an accelerator and its host passes through page-locked blocks");
}

}  // namespace

Key offload_param_section() {
  return section("offload_param", "Keep the shards of parameters off the device (stage 3).",
                 {
                     device().into(&OffloadParamConfig::device),
                     nvme_path().into(&OffloadParamConfig::folders),
                     integer("buffer_count", 5, "Shards in memory at a time: one in use, others read or written.")
                         .between(1, 1024)
                         .into(&OffloadParamConfig::buffer_count),
                     integer("buffer_size", 100'000'000, "Most elements of such a shard; a larger one passes in parts.")
                         .at_least(1)
                         .into(&OffloadParamConfig::buffer_size),
                     integer("max_in_cpu", {}, "Elements per rank that stay in memory (DeepSpeed: 1e9).")
                         .at_least(0)
                         .derives("none")
                         .into(&OffloadParamConfig::max_in_cpu),
                     pin_memory(),
                 })
      .switched_by("device", kNone);
}

Key offload_optimizer_section() {
  constexpr const char* kAlwaysPipelined = "blocks are always read ahead and written behind";
  return section(
             "offload_optimizer",
             "Keep optimizer states (moments, and the masters of 16-bit parameters) off the device.",
             {
                 device().into(&OffloadOptimizerConfig::device),
                 nvme_path().into(&OffloadOptimizerConfig::folders),
                 integer("buffer_count", 4, "Blocks of 4 MiB in memory for each kind of state.")
                     .between(2, 1024)
                     .into(&OffloadOptimizerConfig::buffer_count),
                 number("ratio", 1.0,
                        "Share of the states kept off the device, exact to one block of at most 4 MiB. On an "
                        "accelerator the host steps it while the device steps the rest. \"auto\", measured at the "
                        "start: as much in files as a step hides; on an accelerator, as much as lets both step "
                        "equally long.")
                     .between(0, 1)
                     .auto_means("measured at the start: as much in files as a step hides (device \"nvme\"); on an "
                                 "accelerator, as much as lets host and device step equally long")
                     .into(&OffloadOptimizerConfig::ratio),
                 pin_memory(),
                 flag("pipeline_read", false, "Read ahead.").either(kAlwaysPipelined),
                 flag("pipeline_write", false, "Write behind.").either(kAlwaysPipelined),
                 flag("fast_init", false, "Initialise by files.").either("files begin as zeros without being written"),
                 flag("super_offload", false, "SuperOffload.").later(),
                 number("cpuadam_cores_perc", 0.8, "Share of the cores for CPU Adam.")
                     .between(0, 1)
                     .either("states are stepped by the threads that torch uses"),
             })
      .switched_by("device", kNone);
}

namespace {

/// Matches what config::read_placement takes, but for sizes beyond all memory.
constexpr const char* kShare = R"(^(rest|0*(100(\.0*)?|[0-9]{1,2}(\.[0-9]*)?) *%|[0-9]+(\.[0-9]*)? *([KMGT]i?)?B)$)";

Key tiers_of(std::string name, std::string doc) {
  const auto share = [](const char* tier, const char* of_it) { return word(tier, {}, of_it).matching(kShare); };
  return section(std::move(name), std::move(doc),
                 {share("device", "On the device: \"8GiB\", \"40%\" or \"rest\". A CPU's is the host's memory."),
                  share("cpu", "In the host's memory."), share("nvme", "In files.")})
      .read_by("config::read_placement");
}

}  // namespace

Key placement_section() {
  return section(
      "placement",
      "How much of each kind of state lies where, per rank: a size such as \"8GiB\", which is not exceeded, a "
      "share such as \"40%\", and in one tier the \"rest\". Exact to one block of 4 MiB.",
      {
          tiers_of("optimizer_states", "Moments, and the masters of 16-bit parameters."),
          tiers_of("parameters", "The shards of parameters (stage 3)."),
          tiers_of("gradients", "The sums of gradients that a rank steps (stages 1-3)."),
          nvme_path().into(&PlacementConfig::folders),
      });
}

Key zenflow_section() {
  return section("zenflow", "Update the important columns at once and the rest on the CPU.",
                 {
                     number("topk_ratio", 0.1, "Share of important columns.").between(0, 1),
                     choice("select_strategy", {}, {"step", "epoch"}, "When to choose them anew."),
                     integer("select_interval", {}, "How often.").at_least(1),
                     integer("update_interval", {}, "How often the rest is updated.").at_least(1),
                     flag("overlap_step", false, "Update in another process."),
                     flag("offload", false, "Keep the chosen states on the CPU."),
                     number("auto_ratio", 0.99, "Share that decides an automatic interval.").between(0, 1),
                     integer("full_warm_up_rounds", 0, "Rounds of full updates first.").at_least(0),
                     number("pt_reserved_cores_perc", 0.5, "Share of the cores left to torch.").between(0, 1),
                     integer("steps_per_epoch", {}, "Internal.").at_least(1),
                 })
      .when_present()
      .later();
}

}  // namespace deeptide::config
