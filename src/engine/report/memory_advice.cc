// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says for an engine that ran out of memory who holds how much, and which setting would free how much.

#include <algorithm>
#include <set>

#include "base/libraries/format.h"
#include "base/text.h"
#include "deeptide/errors.h"
#include "engine/design/choices.h"
#include "engine/design/plan.h"
#include "engine/engine_impl.h"

namespace deeptide {

namespace {

using Impl = EngineAccess::Impl;

/// A setting, and what it would free of which memory.
struct Cure {
  const char* text;
  const char* patch;  // of the configuration; null: the text in braces
  MemoryRole frees;
  bool applies = true;  // else this engine has it, or cannot have it
};

device::Role role_of(MemoryRole role) {
  static constexpr device::Role kRoles[] = {device::Role::parameters, device::Role::gradients, device::Role::optimizer,
                                            device::Role::gathered, device::Role::communication};
  return kRoles[static_cast<int>(role)];
}

int64_t bytes_of(const MemoryPlan& plan, MemoryRole role) { return plan.lines[static_cast<size_t>(role)].memory_bytes; }

int64_t bytes_of(const MemoryPlan& plan) {
  int64_t bytes = 0;
  for (const PlanLine& line : plan.lines) bytes += line.memory_bytes;
  return bytes;
}

/// Those of one memory stand together, and those that may be right for this engine: whether they are, and what they
/// free, a design with them says.
std::vector<Cure> cures(const Impl& impl) {
  const bool cpu = impl.design.on_cpu(), trains = impl.optimizer != nullptr, custom = impl.custom != nullptr;
  const int64_t stage = impl.config.zero().stage;
  const bool apart = impl.design.num_ranks() > 1 && !impl.design.is_shared;
  const bool places_states = impl.config.placement().optimizer_states.has_value();
  const bool splits = trains && impl.optimizer->states().use_host();
  return {
      {R"("zero_optimization": {"stage": 1})", nullptr, MemoryRole::optimizer_states, apart && stage == 0},
      {R"("zero_optimization": {"stage": 2})", nullptr, MemoryRole::communication, apart && stage < 2 && trains},
      {R"("zero_optimization": {"stage": 3})", nullptr, MemoryRole::parameters, apart && stage < 3},
      {R"("zero_optimization": {"stage3_max_live_parameters": 0})", nullptr, MemoryRole::gathered},
      {R"("data_types": {"grad_accum_dtype"} of 16 bits)", R"({"data_types": {"grad_accum_dtype": "bf16"}})",
       MemoryRole::gradients, trains && engine::reduce_type(impl.config) != at::kFloat},
      {R"("zero_optimization": {"offload_optimizer": {"device": "nvme"}})",
       R"({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/"}}})",
       MemoryRole::optimizer_states, trains && cpu && !custom && !impl.offloaded},
      {R"("zero_optimization": {"offload_optimizer": {"ratio": 1}})", nullptr, MemoryRole::optimizer_states,
       trains && !cpu && !places_states && splits},
      {R"("zero_optimization": {"offload_optimizer": {"device": "cpu"}})", nullptr, MemoryRole::optimizer_states,
       trains && !cpu && !places_states && !splits},
      {R"("deeptide": {"placement": {"gradients": {"cpu": "rest"}}})",
       R"({"deeptide": {"placement": {"gradients": {"cpu": "rest", "device": null}}}})", MemoryRole::gradients,
       trains && !cpu && !custom && !splits && !impl.reducer->leave()},
      {R"("zero_optimization": {"offload_param": {"device": "cpu"}})", nullptr, MemoryRole::parameters,
       !cpu && !impl.model.offloaded()},
      {R"("deeptide": {"packed_states": true})", nullptr, MemoryRole::optimizer_states, trains && cpu && !custom},
      {R"("deeptide": {"moment_dtype": "bf16"})", nullptr, MemoryRole::optimizer_states, trains && cpu && !custom},
      {R"("deeptide": {"placement": {"gradients": {"nvme": "rest"}}})",
       R"({"deeptide": {"placement": {"gradients": {"nvme": "rest", "cpu": null, "device": null}, "nvme_path": "/"}}})",
       MemoryRole::gradients, trains && cpu && !custom && !impl.kept},
      {R"("zero_optimization": {"offload_param": {"device": "nvme"}})",
       R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/"}}})", MemoryRole::parameters,
       trains && cpu && !custom && stage == 3 && !impl.model.offloaded()},
  };
}

/// Bytes that a design with the setting saves; 0: none, or it does not go with the others. Bytes that move to files all
/// counts: how many blocks pass through memory is another setting.
int64_t freed_by(const Impl& impl, const MemoryPlan& now, const Cure& setting) {
  try {
    const Config config = impl.config.with(setting.patch ? setting.patch : format_text("{{{}}}", setting.text));
    const auto then = engine::plan_of(engine::design(impl.design, config, impl.design.topology), config);
    const PlanLine& line = then.lines[static_cast<size_t>(setting.frees)];
    if (line.file_bytes > 0 && setting.frees != MemoryRole::gradients) return line.file_bytes;
    return std::min(bytes_of(now, setting.frees) - line.memory_bytes, bytes_of(now) - bytes_of(then));
  } catch (const ConfigError&) {
    return 0;
  }
}

}  // namespace

std::string Engine::Impl::memory_advice() const {
  std::vector<std::string> lines;
  const auto add = [&](const std::string& setting, int64_t bytes, device::Role role) {
    if (bytes > 0) lines.push_back(format_text("{} frees {} of {}", setting, bytes_text(bytes), role_name(role)));
  };
  const MemoryPlan now = engine::plan_of(design, config);
  for (const Cure& setting : cures(*this)) {
    if (setting.applies) add(setting.text, freed_by(*this, now, setting), role_of(setting.frees));
  }
  if (optimizer && design.on_cpu() && !offloaded && !custom && !rewind && !optimizer->states().are_away()) {
    add("engine.offload_states(device=\"nvme\") between phases", ledger->current(device::Role::optimizer),
        device::Role::optimizer);
  }
  return lines.empty() ? "" : format_text("Of this rank's memory {}.", join_text(lines, "; "));
}

void Engine::Impl::explain_memory(const char* method, const std::function<void()>& run) const {
  try {
    run();
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find("deeptide: ") != std::string::npos) throw;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "deeptide: no memory is left for temporary tensors in ", method, ". ",
                     ledger->text(), " ", text);
  }
}

}  // namespace deeptide
