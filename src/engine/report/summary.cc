// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes the engine at its start, and the place of every byte.

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "base/libraries/format.h"
#include "base/text.h"
#include "engine/design/choices.h"
#include "engine/design/plan.h"
#include "engine/engine_impl.h"

namespace deeptide {

namespace {

using Impl = EngineAccess::Impl;

std::string millions(int64_t count) {
  if (count < 1000) return std::to_string(count);
  return count < 1'000'000 ? format_text("{:.1f} K", static_cast<double>(count) / 1e3)
                           : format_text("{:.2f} M", static_cast<double>(count) / 1e6);
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

std::string parameter_types(const Impl& impl) {
  std::set<std::string> types;
  for (const auto& unit : impl.model.units()) types.insert(short_name(unit->layout().dtype));
  std::string text;
  for (const auto& type : types) text += (text.empty() ? "" : "+") + type;
  return text;
}

std::string text_of_optimizer(const Impl& impl) {
  if (!impl.design.rule) return "no optimizer";
  const Hyperparameters& group = impl.progress.hyperparameters.front();
  const std::string& name = impl.design.rule->name();
  const bool decouples = group.has("decoupled_weight_decay") && group.get("decoupled_weight_decay") != 0.0;
  return name == "Adam" && decouples ? "AdamW" : name;
}

std::string text_of_clipping(const Impl& impl) {
  const double limit = impl.config.gradients().clipping;
  return limit > 0 ? format_text("clipping {}", limit) : "no clipping";
}

/// "2 ranks on this CPU", "8 ranks (pipe=2 data=4) on 2 hosts, cuda".
std::string text_of_ranks(const Impl& impl) {
  const world::Mesh& mesh = impl.channels.mesh();
  const int count = mesh.num_ranks();
  std::string text = count == 1 ? "1 rank" : format_text("{} ranks", count);
  if (mesh.size(world::Axis::data) < count) text += " (" + mesh.text() + ")";
  const int on_host = impl.channels.topology().on_host;
  const bool is_here = count == 1 || on_host == count;
  if (impl.model.device().is_cpu()) return text + (is_here ? " on this CPU" : " on CPUs");
  return text + " on " + c10::DeviceTypeName(impl.model.device().type(), /*lower_case=*/true);
}

std::string text_of_publishing(const Impl& impl) {
  const std::optional<bool> wanted = impl.config.runtime().overlap_publish;
  const std::string unasked = wanted ? "" : " (overlap_publish is not given)";
  if (impl.arrivals) return "\n  publishing: beside the next forward" + unasked;
  if (!wanted.value_or(false)) return "";
  return "\n  publishing: within step(); overlap_publish is for stages 1 and 2 over several hosts";
}

/// The share of the training state that lies with each rank.
std::string text_of_sharing(const Impl& impl, int64_t sharded) {
  const int ranks = impl.channels.data().size();
  const auto share = [ranks](bool is_sharded) { return is_sharded ? format_text("1/{} of the", ranks) : "all"; };
  std::string text = "\n  each rank keeps: ";
  if (impl.model.arena()) {
    text += "the parameters in one copy with the other ranks of its host";
  } else {
    text += share(sharded > 0) + " parameters";
    const int64_t whole = impl.model.num_elements() - sharded;
    if (sharded > 0 && whole > 0) text += format_text(" ({} of them whole)", millions(whole));
  }
  if (!impl.optimizer) return text;
  const zero::StagePolicy& policy = impl.design.policy;
  return text + ", " + share(policy.reduce_every_micro) + " gradients, " + share(policy.shard_optimizer) +
         " optimizer states";
}

std::string text_of_wire(const Impl& impl) {
  const int bits = impl.design.reductions.bits;
  return bits > 0 ? format_text("int{}", bits) : short_name(engine::reduce_type(impl.config));
}

std::string text_of_quantization(const Impl& impl) {
  if (!impl.reducer || engine::quantized_bits(impl.config) == 0) return "";
  const int bits = impl.design.reductions.bits;
  if (bits == 0) return "\n  quantized gradients: none, since no gradient travels between hosts";
  return format_text(
      "\n  quantized gradients: int{}, one scale per {} elements; rounded by at most {:.3g} % of the "
      "largest of these{}",
      bits, numerics::kQuantizedBlock, 100.0 * numerics::largest_loss(bits),
      impl.design.reductions.feedback ? "; the error is added to the next gradients" : "");
}

std::string text_of_types(const Impl& impl, const std::string& parameters) {
  const zero::StateTypes& states = impl.design.types;
  std::string master = states.rounded_masters ? parameters : "fp32";
  if (states.packed_masters) master += ", packed beside parameters";
  std::string moments = states.rounded_moments ? parameters : "fp32";
  if (states.moments_seed) moments = "bf16, rounded stochastically";
  return format_text("\n  types: parameters {}, compute {}, reduce {}, accumulate {}, master {}, moments {}",
                     parameters, parameters, text_of_wire(impl), short_name(engine::accumulate_type(impl.config)),
                     master, moments);
}

/// A model whose forward mixes types fails in an operator that knows no names: here they stand.
std::string text_of_buffers(const Impl& impl) {
  constexpr size_t kMostNamed = 3;
  const auto& [in_fp32, cast] = impl.model.buffers();
  std::string text;
  if (cast > 0) text += format_text("\n  buffers: {} cast, as data_types says", cast);
  if (in_fp32.empty()) return text;
  const auto named = std::span(in_fp32).first(std::min(kMostNamed, in_fp32.size()));
  return text + format_text("\n  buffers: {} stay fp32 ('{}'{}); data_types.buffer_dtype would cast them",
                            in_fp32.size(), join_text(named, "', '"), in_fp32.size() > kMostNamed ? ", …" : "");
}

std::string text_of_precision(const Impl& impl) {
  std::string text;
  if (const PrecisionConfig& precision = impl.config.precision(); precision.scales_loss()) {
    const std::string how =
        precision.loss_scale > 0
            ? "fixed"
            : format_text("doubled after {} good steps, halved after {} overflows, at least {}",
                          precision.loss_scale_window, precision.hysteresis, precision.min_loss_scale);
    text += format_text("\n  loss scale: {:g}, {}", optim::initial_loss_scale(precision).scale, how);
  }
  text += text_of_buffers(impl);
  if (impl.config.precision().autocast) {
    const bool half = impl.config.precision().autocast_dtype == DataType::fp16;
    text += format_text("\n  autocast: to {} in engine.forward() (in C++: within a deeptide::Autocast)",
                        half ? "fp16" : "bf16");
  }
  return text;
}

/// The actual split.
std::string text_of_host_states(const Impl& impl) {
  const zero::OptimizerStates& states = impl.optimizer->states();
  const double share = 100.0 * static_cast<double>(states.numel_on_host()) / static_cast<double>(states.numel());
  std::string text = "\n  optimizer states: ";
  if (states.numel_on_host() < states.numel()) {
    text += format_text("of {:.1f} % of the elements on {} ({}), of {:.1f} % off it, ", 100.0 - share,
                        impl.model.device().str(), bytes_text(states.predicted_bytes() - states.host_bytes()), share);
  }
  text += impl.offloaded ? impl.offloaded->text()
                         : format_text("in the host's memory ({})", bytes_text(states.host_bytes()));
  text += "; stepped by the host";
  const std::string passing = bytes_text(impl.optimizer->passing_bytes());
  if (!impl.custom) return text + ", through " + passing + " of page-locked memory";
  return impl.reducer->leave() ? text : text + ", gradients copied to " + passing + " of its memory";
}

std::string text_of_placement(const Impl& impl) {
  std::string text;
  if (impl.model.offloaded()) text += "\n  parameters: " + impl.model.offloaded()->text();
  if (impl.optimizer && impl.optimizer->states().use_host()) {
    text += text_of_host_states(impl);
  } else if (impl.offloaded) {
    text += "\n  optimizer states: " + impl.offloaded->text();
  }
  if (impl.progress.offload_ratio >= 0.0) {
    text += format_text("\n  ratio: {:.2f}, {}, as measured now", impl.progress.offload_ratio,
                        impl.model.device().is_cpu() ? "the most whose transfers a step hides"
                                                     : "at which host and device step equally long");
  }
  if (impl.reducer && impl.reducer->leave()) {
    text += format_text("\n  gradients: leave for the host's memory during backward ({}, page-locked)",
                        bytes_text(impl.reducer->predicted().gradients_on_host));
  }
  if (impl.reducer && impl.reducer->files()) text += "\n  gradients: " + impl.reducer->files()->text();
  return text;
}

}  // namespace

/// The start in a line, and each decision that the configuration left open.
std::string Engine::Impl::brief() const {
  std::string trained;
  if (const std::string count = millions(model.num_trainable()); count != millions(model.num_elements()))
    trained = format_text(" ({} trained)", count);
  const int batches = design.topology.num_batches();
  std::string text =
      format_text("{}, ZeRO-{} | {} parameters{} | {} | batch {} = ", text_of_ranks(*this), config.zero().stage,
                  millions(model.num_elements()), trained, parameter_types(*this), batch.train);
  text += format_text("{} x {}", batches, batch.micro);
  if (batch.accumulation > 1) text += format_text(" x {} accumulated", batch.accumulation);
  text += " | " + text_of_optimizer(*this);
  if (design.rule) text += ", " + text_of_clipping(*this);
  for (const auto& decision : config.decisions()) text += "\n  " + decision;
  return text;
}

std::string Engine::Impl::summary() const {
  const int num_ranks = channels.mesh().num_ranks();
  int64_t sharded = 0;
  for (const auto& unit : model.units()) {
    sharded += unit->memory() == sharding::UnitMemory::sharded ? unit->layout().used : 0;
  }
  std::string text = format_text("ZeRO stage {}, world {} ({}, found by {}), {}", config.zero().stage, num_ranks,
                                 channels.mesh().text(), channels.world().source, model.device().str());
  if (channels.data().size() > 1) {
    text += (channels.mesh().size(world::Axis::pipe) > 1 ? "\n  hosts, of each stage: " : "\n  hosts: ") +
            channels.host()->text();
  }
  text += format_text("\n  model: {} parameters ({} trained) in {} units", millions(model.num_elements()),
                      millions(model.num_trainable()), model.units().size());
  if (num_ranks > 1) text += text_of_sharing(*this, sharded);
  text += text_of_types(*this, parameter_types(*this));
  text += text_of_quantization(*this);
  text += text_of_precision(*this);
  text +=
      format_text("\n  batch: {} = {} per rank x {} accumulated x {} ranks; {}, {}", batch.train, batch.micro,
                  batch.accumulation, design.topology.num_batches(), text_of_optimizer(*this), text_of_clipping(*this));
  if (optimizer && optimizer->signs()) {
    text += format_text("\n  compression: {} bytes per rank in a step in which ranks exchange signs",
                        optimizer->signs()->bytes_per_step());
  }
  text += text_of_publishing(*this);
  text += text_of_placement(*this);
  if (sharded > 0) {
    text += format_text("\n  gathered at once: at most {} ({})", millions(residency->budget()),
                        config.zero().max_live_parameters ? "stage3_max_live_parameters, or the two largest units"
                                                          : "a quarter of the model, or the two largest units; "
                                                            "stage3_max_live_parameters is not given");
  }
  if (const std::string line = links.text(); !line.empty()) text += "\n  " + line;
  for (const auto& decision : config.decisions()) text += "\n  " + decision;
  return text;
}

std::vector<MemoryLine> Engine::Impl::memory() const {
  const int64_t transport = engine::transport_bytes(design);
  const auto reduced = reducer ? reducer->predicted() : gradients::ReducerForecast();
  const int64_t exchanged = engine::step_bytes(design);
  const bool any_sharded = std::any_of(model.units().begin(), model.units().end(), [](const auto& unit) {
    return unit->memory() == sharding::UnitMemory::sharded;
  });
  const auto line = [&](MemoryRole name, device::Role role, int64_t predicted, int64_t late = 0,
                        int64_t uncounted = 0) {
    const device::Role beyond = device::beyond_reserve(role);
    return MemoryLine{.role = name,
                      .predicted_bytes = predicted + uncounted,
                      .measured_bytes = ledger->peak(role) + uncounted,
                      .late_bytes = late,
                      .measured_late_bytes = beyond == role ? 0 : ledger->peak(beyond)};
  };
  const bool use_host = optimizer && optimizer->states().use_host();
  const int64_t beside = use_host ? optimizer->predicted_bytes() - optimizer->states().host_bytes() : 0;
  // On a device's host, or, where there is none, all.
  const int64_t states = (optimizer ? optimizer->predicted_bytes() : 0) - beside +
                         (rewind ? rewind->predicted_bytes() : 0) + (offloaded ? offloaded->staging_bytes() : 0);
  std::vector<MemoryLine> lines{
      line(MemoryRole::parameters, device::Role::parameters, model.predicted_bytes()),
      line(MemoryRole::gradients, device::Role::gradients, reduced.gradients + (kept ? kept->predicted_bytes() : 0),
           reduced.late_gradients),
      line(MemoryRole::optimizer_states, device::Role::optimizer, std::max(most_bytes_of_states, states)),
      line(MemoryRole::gathered, device::Role::gathered, any_sharded ? residency->predicted_bytes() : 0),
      line(MemoryRole::communication, device::Role::communication, reduced.communication + exchanged,
           reduced.late_communication, transport)};
  lines.front().off_device_bytes = model.off_device_bytes();
  lines.front().measured_off_device_bytes = ledger->peak(device::Role::host_parameters);
  MemoryLine& sums = lines[static_cast<size_t>(MemoryRole::gradients)];
  sums.off_device_bytes = reduced.gradients_on_host;
  sums.measured_off_device_bytes = ledger->peak(device::Role::host_gradients);
  if (use_host) {
    MemoryLine& moved = lines[static_cast<size_t>(MemoryRole::optimizer_states)];
    moved.off_device_bytes = std::exchange(moved.predicted_bytes, beside) + optimizer->passing_bytes();
    moved.measured_off_device_bytes = ledger->peak(device::Role::host_optimizer);
  }
  return lines;
}

}  // namespace deeptide
