// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What the engine tells at its start, and where every byte is.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "engine/engine_impl.h"

namespace deeptide {

using device::Role;

namespace {

std::string millions(int64_t count) {
  if (count < 1000) return std::to_string(count);
  return count < 1'000'000 ? fmt::format("{:.1f} K", count / 1e3) : fmt::format("{:.2f} M", count / 1e6);
}

const char* short_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "fp32";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    default:
      return c10::toString(type);
  }
}

int64_t bytes(int64_t numel, at::ScalarType type) { return numel * static_cast<int64_t>(c10::elementSize(type)); }

/// Gloo gathers into a flat copy of its own, and malloc keeps that for the next one. Ranks of one host do without.
int64_t transport_bytes(const Engine::Impl& impl) {
  if (impl.host->holds_all() || !impl.model.device().is_cpu()) return 0;
  int64_t largest = 0;
  for (const auto& unit : impl.model.units()) {
    const bool gathers_gradients = !impl.policy.shard_optimizer;
    if (gathers_gradients && !(unit->layout().trainable && impl.optimizer)) continue;
    largest = std::max(largest, bytes(unit->numel(), gathers_gradients ? at::kFloat : unit->layout().dtype));
  }
  return largest;
}

}  // namespace

std::string Engine::Impl::summary() const {
  std::set<std::string> types;
  int64_t sharded = 0;
  for (const auto& unit : model.units()) {
    types.insert(short_name(unit->layout().dtype));
    sharded += unit->sharded() ? unit->layout().used : 0;
  }
  std::string parameter_types;
  for (const auto& type : types) parameter_types += (parameter_types.empty() ? "" : "+") + type;
  std::string text = fmt::format("ZeRO stage {}, world {} ({}, found by {}), {}", config.zero.stage, world.size,
                                 mesh.text(), world.source, model.device().str());
  if (world.size > 1) text += "\n  hosts: " + host->text() + (model.arena() ? ", one copy of the parameters" : "");
  text += fmt::format("\n  model: {} parameters ({} trained) in {} units; {} sharded", millions(model.num_elements()),
                      millions(model.num_trainable()), model.units().size(), millions(sharded));
  text += fmt::format("\n  types: parameters {}, compute {}, reduce {}, accumulate fp32, master fp32, moments fp32",
                      parameter_types, parameter_types, short_name(reduce_type(config)));
  text += fmt::format("\n  batch: {} = {} per rank x {} accumulated x {} ranks; {}, clipping {}", batch.train,
                      batch.micro, batch.accumulation, world.size, rule ? rule->name() : "no optimizer",
                      config.gradient_clipping > 0 ? fmt::format("{}", config.gradient_clipping) : "off");
  if (sharded > 0) {
    text += fmt::format("\n  gathered at once: at most {} ({})", millions(residency->budget()),
                        config.zero.max_live_parameters ? "stage3_max_live_parameters, or the two largest units"
                                                        : "a quarter of the model, or the two largest units; "
                                                          "stage3_max_live_parameters is not given");
  }
  for (const auto& decision : config.decisions) text += "\n  " + decision;
  return text;
}

std::vector<MemoryLine> Engine::Impl::memory() const {
  int64_t parameters = 0, gradients = 0, states = 0, bucket = 0, kept = 0;
  bool sharded = false;
  const bool keeps_rows = reducer && reducer->keeps_rows();
  const bool accumulates_whole = !policy.reduce_every_micro && batch.accumulation > 1;
  for (const auto& unit : model.units()) {
    const auto& layout = unit->layout();
    parameters += bytes(unit->sharded() || unit->shared() ? layout.shard : layout.numel, layout.dtype);
    sharded = sharded || unit->sharded();
    if (!layout.trainable || !optimizer) continue;
    bucket = std::max(bucket, bytes(layout.numel, reduce_type(config)));
    kept += accumulates_whole ? bytes(layout.numel, at::kFloat) : 0;
    gradients += keeps_rows ? bytes(layout.numel, reduce_type(config)) : bytes(layout.shard, at::kFloat);
    const int64_t stepped = policy.shard_optimizer ? layout.shard : layout.numel;
    const int copies = optimizer->num_states() + (layout.dtype == at::kFloat ? 0 : 1);
    states += copies * bytes(stepped, at::kFloat);
  }
  // One bucket fills while others are under way, each sent and received; in shared memory they are sent only, and one
  // may wait for its last reader. Rows that stay until the step are gradients.
  int64_t buckets = 1;
  if (world.size > 1) buckets = (keeps_rows ? 1 : 2) * static_cast<int64_t>(gradients::kMaxFlights + 1);
  if (model.arena()) buckets = static_cast<int64_t>(gradients::kMaxOffers + 2);
  if (reducer && reducer->buckets_stay()) buckets = 0;
  const int64_t communication = kept + bucket * buckets + transport_bytes(*this);
  return {{"parameters", parameters, ledger->peak(Role::parameters)},
          {"gradients", gradients, ledger->peak(Role::gradients)},
          {"optimizer states", states, ledger->peak(Role::optimizer)},
          {"gathered peak", bytes(sharded ? residency->budget() : 0, model.units().front()->layout().dtype),
           ledger->peak(Role::gathered)},
          {"communication", communication, ledger->peak(Role::communication) + transport_bytes(*this)}};
}

}  // namespace deeptide
