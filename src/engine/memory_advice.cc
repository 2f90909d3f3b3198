// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an engine that ran out of memory says: who holds how much, and which setting would free how much.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/text.h"
#include "deeptide/errors.h"
#include "engine/choices.h"
#include "engine/engine_impl.h"

namespace deeptide {

namespace {

using Layouts = std::vector<const sharding::UnitLayout*>;

/// Collects settings, those that free nothing left out.
class Advice {
 public:
  void add(const std::string& setting, int64_t bytes, const char* of_what) {
    if (bytes > 0) lines_.push_back(fmt::format("{} frees {} of {}", setting, bytes_text(bytes), of_what));
  }
  std::string text() const {
    if (lines_.empty()) return "";
    return fmt::format("Of this rank's memory {}.", fmt::join(lines_, "; "));
  }

 private:
  std::vector<std::string> lines_;
};

/// Sums of micro-batches that stages 0 and 1 keep whole until ranks exchange them.
int64_t whole_sums(const Config& config, const Layouts& trained) {
  int64_t bytes = 0;
  for (const auto* unit : trained) {
    bytes += unit->numel * static_cast<int64_t>(c10::elementSize(engine::accumulate_type(config)));
  }
  return bytes;
}

/// What a rank would no longer keep of others' shards. Ranks of one host that share their memory keep each once.
void advise_stage(const Engine::Impl& impl, int64_t accumulation, Advice& advice) {
  const int64_t ranks = impl.channels.data().size();
  const int64_t stage = impl.config.zero().stage;
  if (ranks == 1 || impl.model.arena()) return;
  const auto others = [&](device::Role role) { return impl.ledger->current(role) / ranks * (ranks - 1); };
  if (stage == 0)
    advice.add("\"zero_optimization\": {\"stage\": 1}", others(device::Role::optimizer),
               role_name(device::Role::optimizer));
  if (stage < 2 && accumulation > 1 && impl.reducer) {
    advice.add("\"zero_optimization\": {\"stage\": 2}",
               whole_sums(impl.config, sharding::layouts_of(impl.model.trainable())),
               role_name(device::Role::communication));
  }
  if (stage == 3) return;
  Layouts all;
  for (const auto& unit : impl.model.units()) all.push_back(&unit->layout());
  const int64_t gathered = sharding::forecast(all, engine::residency_limits(impl.config, impl.model.num_elements()));
  advice.add("\"zero_optimization\": {\"stage\": 3}", others(device::Role::parameters) - gathered,
             role_name(device::Role::parameters));
}

/// What states would take less of in fewer bits. Only where the optimizer can: the configuration's own check decides.
void advise_state_types(const Engine::Impl& impl, Advice& advice) {
  const auto allows = [&](const char* patch) {
    try {
      engine::state_types(impl.config.with(patch), *impl.rule, impl.groups, impl.model.device());
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  };
  const zero::OptimizerStates& states = impl.optimizer->states();
  int64_t halves = 0, moments = 0;
  for (int unit = 0; unit < states.num_units(); ++unit) {
    const int64_t numel = states.master(unit).numel();
    if (states.has_own_master(unit) && states.unit(unit).layout().dtype == at::kBFloat16) halves += 2 * numel;
    for (size_t role = 0; role < states.rule().roles().size(); ++role) {
      const tiers::Buffer& state = states.state(unit, role);
      if (state.defined() && state.dtype() == at::kFloat) moments += 2 * numel;
    }
  }
  const char* const role = role_name(device::Role::optimizer);
  if (halves > 0 && allows(R"({"deeptide": {"packed_states": true}})")) {
    advice.add("\"deeptide\": {\"packed_states\": true}", halves, role);
  }
  if (moments > 0 && allows(R"({"deeptide": {"moment_dtype": "bf16"}})")) {
    advice.add("\"deeptide\": {\"moment_dtype\": \"bf16\"}", moments, role);
  }
}

/// What a device would no longer keep. Only where the host can step it: the configuration's own check decides.
void advise_host(const Engine::Impl& impl, Advice& advice) {
  if (impl.config.placement().optimizer_states) return;  // it decides, not that section
  const bool splits = impl.optimizer->states().use_host();
  const char* const setting = splits ? R"("zero_optimization": {"offload_optimizer": {"ratio": 1}})"
                                     : R"("zero_optimization": {"offload_optimizer": {"device": "cpu"}})";
  try {
    engine::state_types(impl.config.with(fmt::format("{{{}}}", setting)), *impl.rule, impl.groups, impl.model.device());
    advice.add(setting, impl.ledger->current(device::Role::optimizer), role_name(device::Role::optimizer));
  } catch (const ConfigError&) {
  }
}

/// Of parameters that a device steps, and that would have masters of their own there if they lay off it.
int64_t bytes_of_new_masters(const zero::OptimizerStates& states) {
  int64_t bytes = 0;
  for (int unit = 0; unit < states.num_units(); ++unit) {
    if (states.unit(unit).memory() != sharding::UnitMemory::sharded) continue;
    for (const zero::StatePart& part : states.parts(unit)) bytes += part.aliased ? part.master.nbytes() : 0;
  }
  return bytes;
}

/// Shards of parameters: likewise.
void advise_host_parameters(const Engine::Impl& impl, Advice& advice) {
  if (impl.config.zero().stage != 3 || impl.model.offloaded()) return;
  const char* const setting = R"("zero_optimization": {"offload_param": {"device": "cpu"}})";
  try {
    engine::bind_options(impl.config.with(fmt::format("{{{}}}", setting)), impl.policy, impl.rule, impl.custom.get(),
                         impl.groups, impl.model.device());
    const int64_t needed = impl.optimizer ? bytes_of_new_masters(impl.optimizer->states()) : 0;
    advice.add(setting, impl.ledger->current(device::Role::parameters) - needed, role_name(device::Role::parameters));
  } catch (const ConfigError&) {
  }
}

/// Sums that a device steps could wait on the host.
void advise_host_gradients(const Engine::Impl& impl, Advice& advice) {
  const bool steps_shard = impl.policy.shard_optimizer || impl.channels.data().size() == 1;
  const bool is_placed = impl.optimizer->states().use_host() || impl.reducer->leave();
  if (is_placed || !steps_shard || impl.kept || impl.custom) return;
  std::vector<gradients::HostSums::Cut> all;
  for (const sharding::UnitLayout* unit : sharding::layouts_of(impl.model.trainable())) all.push_back({unit->shard, 0});
  const auto type = engine::accumulate_type(impl.config);
  advice.add("\"deeptide\": {\"placement\": {\"gradients\": {\"cpu\": \"rest\"}}}",
             impl.ledger->current(device::Role::gradients) - gradients::HostSums::forecast(all, type).on_device,
             role_name(device::Role::gradients));
}

/// What could lie in files, beside optimizer states.
void advise_files(const Engine::Impl& impl, Advice& advice) {
  const int64_t sums = impl.ledger->current(device::Role::gradients);
  const bool steps_shard = impl.policy.shard_optimizer || impl.channels.data().size() == 1;
  if (impl.reducer && !impl.reducer->files() && steps_shard && !impl.kept) {
    advice.add("\"deeptide\": {\"placement\": {\"gradients\": {\"nvme\": \"rest\"}}}",
               sums - engine::kGradientBlocks * tiers::kSwapBlockBytes, role_name(device::Role::gradients));
  }
  if (impl.config.zero().stage == 3 && !impl.model.offloaded() && !impl.rewind) {
    advice.add("\"zero_optimization\": {\"offload_param\": {\"device\": \"nvme\"}}",
               impl.ledger->current(device::Role::parameters), role_name(device::Role::parameters));
  }
}

}  // namespace

std::string Engine::Impl::memory_advice() const {
  Advice advice;
  advise_stage(*this, batch.accumulation, advice);
  const Layouts sharded = sharding::layouts_of(model.sharded());
  if (!sharded.empty()) {
    const int64_t least = sharding::forecast(sharded, {});
    advice.add("\"zero_optimization\": {\"stage3_max_live_parameters\": 0}", residency->predicted_bytes() - least,
               role_name(device::Role::gathered));
  }
  if (reducer && engine::reduce_type(config) != at::kFloat && engine::accumulate_type(config) == at::kFloat) {
    advice.add("\"data_types\": {\"grad_accum_dtype\"} of 16 bits", ledger->current(device::Role::gradients) / 2,
               role_name(device::Role::gradients));
  }
  if (optimizer && model.device().is_cpu() && !offloaded && !custom) {
    advice.add("\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"nvme\"}}",
               ledger->current(device::Role::optimizer), role_name(device::Role::optimizer));
    if (!rewind && !optimizer->states().are_away()) {
      advice.add("engine.offload_states(device=\"nvme\") between phases", ledger->current(device::Role::optimizer),
                 role_name(device::Role::optimizer));
    }
  }
  if (optimizer && !model.device().is_cpu()) {
    advise_host(*this, advice);
    advise_host_gradients(*this, advice);
  }
  if (!model.device().is_cpu()) advise_host_parameters(*this, advice);
  if (optimizer && model.device().is_cpu() && !custom) {
    advise_state_types(*this, advice);
    advise_files(*this, advice);
  }
  return advice.text();
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
