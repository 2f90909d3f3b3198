// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Plans each stage and placement, and compares it with what a machine has left.

#include <algorithm>
#include <map>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "base/text.h"
#include "deeptide/errors.h"
#include "deeptide/plan.h"

namespace deeptide {

using nlohmann::json;

namespace {

struct Setting {
  std::string name;
  json zero;
  json placement;
};

/// From the fastest to the smallest.
std::vector<Setting> settings_for(const std::vector<std::string>& folders) {
  std::vector<Setting> settings;
  for (int stage = 0; stage < 4; ++stage) settings.push_back({format_text("stage {}", stage), {{"stage", stage}}, {}});
  if (folders.empty()) return settings;
  const json files = {{"device", "nvme"}, {"nvme_path", folders}};
  for (int stage = 1; stage < 4; ++stage) {
    settings.push_back({format_text("stage {}, optimizer states in files", stage),
                        {{"stage", stage}, {"offload_optimizer", files}},
                        {}});
  }
  const json both = {{"stage", 3}, {"offload_optimizer", files}, {"offload_param", files}};
  settings.push_back({"stage 3, optimizer states and parameters in files", both, {}});
  settings.push_back({"stage 3, all of them and gradients in files",
                      both,
                      {{"gradients", {{"nvme", "rest"}}}, {"nvme_path", folders}}});
  return settings;
}

/// The sections that the setting adds to a configuration.
json sections_of(const Setting& setting) {
  json sections = {{"zero_optimization", setting.zero}};
  if (!setting.placement.is_null()) sections["deeptide"] = {{"placement", setting.placement}};
  return sections;
}

/// The patch that makes the setting of a configuration which may have another placement.
json patch_of(const Setting& setting) {
  json patch = {{"zero_optimization", {{"offload_optimizer", nullptr}, {"offload_param", nullptr}}},
                {"deeptide", {{"placement", setting.placement}}}};
  patch["zero_optimization"].update(setting.zero);
  return patch;
}

/// Blocks are striped, so each folder takes as much; folders on one file system share what is free there.
std::string why_disks_are_full(int64_t file_bytes, const std::vector<FolderSpace>& folders) {
  if (file_bytes == 0) return "";
  std::map<uint64_t, std::vector<const FolderSpace*>> by_device;
  for (const FolderSpace& folder : folders) by_device[folder.device].push_back(&folder);
  for (const auto& [device, on_it] : by_device) {
    const auto share = static_cast<double>(on_it.size()) / static_cast<double>(folders.size());
    const auto needed = static_cast<int64_t>(static_cast<double>(file_bytes) * share);
    if (needed <= on_it.front()->free_bytes) continue;
    return format_text("files take {} of {}, which has {} free", bytes_text(needed), on_it.front()->folder,
                       bytes_text(on_it.front()->free_bytes));
  }
  return folders.empty() ? "no folder for files is known" : "";
}

}  // namespace

int64_t MemoryPlan::peak_bytes() const {
  int64_t peak = 0;
  for (const PlanPhase& phase : phases) peak = std::max(peak, phase.memory_bytes);
  return peak;
}

int64_t MemoryPlan::host_bytes() const {
  int64_t bytes = peak_bytes();
  for (const PlanLine& line : lines) bytes += line.off_device_bytes;
  return bytes * world.ranks_per_host;
}

int64_t MemoryPlan::host_file_bytes() const {
  int64_t bytes = 0;
  for (const PlanLine& line : lines) bytes += line.file_bytes;
  return bytes * world.ranks_per_host;
}

std::string why_not(const MemoryPlan& plan, const MachineLimits& machine) {
  if (plan.host_bytes() > machine.memory_bytes) {
    return format_text("the ranks of a host take {}, and {} leaves {}", bytes_text(plan.host_bytes()), machine.bound,
                       bytes_text(machine.memory_bytes));
  }
  return why_disks_are_full(plan.host_file_bytes(), machine.folders);
}

std::vector<PlanChoice> plan_choices(const ModelDescription& model, const Config& config, const MachineLimits& machine,
                                     const InitOptions& options, const PlannedWorld& world) {
  std::vector<std::string> folders;
  for (const FolderSpace& folder : machine.folders) folders.push_back(folder.folder);
  std::vector<PlanChoice> choices;
  for (const Setting& setting : settings_for(folders)) {
    try {
      PlanChoice choice{.name = setting.name, .sections = write_json(sections_of(setting))};
      choice.plan = plan(model, config.with(write_json(patch_of(setting))), options, world);
      choice.why_not = why_not(choice.plan, machine);
      choices.push_back(std::move(choice));
    } catch (const ConfigError&) {  // this optimizer or option does not go with it
    }
  }
  return choices;
}

}  // namespace deeptide
