// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rows in the order in which a start met them.
#include "engine/design/refusals.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/libraries/format.h"
#include "deeptide/errors.h"
#include "engine/design/choices.h"
#include "optim/compressed/compressed_rule.h"

namespace deeptide::engine {

namespace {

/// Features that exclude each other, what is wrong with them, and what to do instead.
struct Refusal {
  bool features;
  std::string text;
  std::string cure;
};

void check(const Config& config, const std::vector<Refusal>& table) {
  const auto met = std::find_if(table.begin(), table.end(), [](const Refusal& row) { return row.features; });
  if (met != table.end()) throw ConfigError(config.origin() + ": " + met->text + met->cure);
}

/// Refusals for parameters that lie off the device, or in files.
std::vector<Refusal> of_parameters(const Config& config, const ModelFacts& model, const optim::Rule* rule) {
  const PlacementConfig& placement = config.placement();
  const bool in_files = has_parameters_in_files(config);
  const bool placed = wants_files(placement.parameters) || (!model.device.is_cpu() && placement.parameters_on_device);
  const bool elsewhere = places_parameters(config, model.device);
  const std::string subject =
      placed ? format_text("deeptide.placement.parameters {} ", in_files ? "in files" : "off the device")
             : format_text("zero_optimization.offload_param.device \"{}\" ", in_files ? "nvme" : "cpu");
  const bool splits_states =
      placement.optimizer_states || measures_ratio(config) || share_on_host(config, model.device) != 1.0;
  return {
      {elsewhere && config.zero().stage != 3,
       subject + "needs stage 3, where each rank keeps a shard of the parameters; the stage is ",
       std::to_string(config.zero().stage)},
      {elsewhere && !model.device.is_cpu() && rule && config.runtime().packed_states && splits_states,
       format_text("deeptide.packed_states with parameters off {} needs offload_optimizer with a ratio of 1: what the "
                   "device steps has whole masters there. ",
                   model.device.str()),
       "Set packed_states to false, or let the host step all"},
      {in_files && !placed && config.offload_param().folders.empty(), subject,
       "needs nvme_path: a folder on the drive, or a list of folders"},
      {in_files && config.runtime().on_skipped == OnSkipped::rewind,
       subject + "does not go with deeptide.on_skipped \"rewind\", which keeps a copy of the parameters in memory; ",
       "choose \"skip\" or \"raise\""},
  };
}

/// Refusals for states that the host steps for a device.
std::vector<Refusal> of_host_steps(const Config& config, const ModelFacts& model, const optim::Rule& rule) {
  const bool asked = share_on_host(config, model.device) > 0.0;
  const bool takes_matrices = std::any_of(model.groups.begin(), model.groups.end(), [&](const ParameterGroup& group) {
    return rule.reach(group.hyperparameters) == optim::Reach::whole_parameter;
  });
  const bool placed = config.placement().optimizer_states.has_value();
  const bool in_two_places = placed || measures_ratio(config) || config.offload_optimizer().ratio < 1.0;
  const std::string subject =
      format_text("{} on {} does not go with ",
                  placed ? "deeptide.placement.optimizer_states off the device" : "zero_optimization.offload_optimizer",
                  model.device.str());
  const std::string or_else = placed ? ", or give the device \"100%\"" : ", or set the section's device to \"none\"";
  const std::string optimizer = "the optimizer " + rule.name();
  return {
      {asked && config.runtime().packed_states && config.offload_param().device == OffloadDevice::none,
       subject + "deeptide.packed_states without offload_param yet; ",
       "leave it out: masters take no memory of the device then" + or_else},
      {asked && takes_matrices && in_two_places,
       subject + optimizer + ", which takes whole matrices, in two places yet; ",
       "set its ratio to 1, with no placement" + or_else},
      {asked && keeps_whole_states(&rule), subject + optimizer + ", whose ranks exchange signs yet; ",
       "choose another one" + or_else},
      {asked && in_two_places && is_callers(&rule),
       subject + optimizer + ", your own, which steps states in one place yet; ",
       "set its ratio to 1, with no placement" + or_else},
  };
}

/// Refusals for masters and moments in other types than fp32.
std::vector<Refusal> of_state_types(const Config& config, const ModelFacts& model, const optim::Rule& rule) {
  const PrecisionConfig& precision = config.precision();
  const bool bf16_moments = config.runtime().moment_dtype == DataType::bf16;
  const bool elementwise = steps_elements(rule);
  const std::string elements =
      "is for optimizers that step each element by itself: Adam, AdamW, SGD, Lion, Adagrad, RMSprop; " + rule.name();
  std::vector<Refusal> table{
      {precision.rounds_masters() && !elementwise,
       format_text("{} {} needs fp32 masters. ",
                   precision.fp16 ? "fp16.fp16_master_weights_and_grads" : "bf16.bf16_master_weights_and_grads",
                   elements),
       "Set it to false, or choose one of them"},
      {config.runtime().packed_states && is_callers(&rule),
       "deeptide.packed_states is for the optimizers of deeptide: " + rule.name() +
           ", your own, steps fp32 masters where they lie. ",
       "Set it to false, or name the optimizer in the configuration"},
      {bf16_moments && !elementwise, "deeptide.moment_dtype " + elements + " needs fp32. ",
       "Leave it out, or choose one of them"},
  };
  for (const ParameterGroup& group : model.groups) {
    const std::string why = bf16_moments ? rule.needs_fp32_states(group.hyperparameters) : "";
    table.push_back({!why.empty(), "deeptide.moment_dtype \"bf16\" does not suit " + rule.name() + ": ", why});
  }
  return table;
}

/// Refusals for kept gradients, and for states in files.
std::vector<Refusal> of_training(const Config& config, const ModelFacts& model, const optim::Rule& rule) {
  const RuntimeConfig& runtime = config.runtime();
  const bool states_in_files = has_states_in_files(config);
  return {
      {states_in_files && !wants_files(config.placement().optimizer_states) &&
           config.offload_optimizer().folders.empty(),
       "zero_optimization.offload_optimizer.device \"nvme\" ",
       "needs nvme_path: a folder on the drive, or a list of folders"},
      {runtime.keep_grad && config.zero().stage == 3,
       "deeptide.keep_grad keeps whole gradients on every rank, which stage 3 is there to avoid. ",
       "Choose stage 0, 1 or 2, or read them by safe_get_full_grad(parameter) before step()"},
      {runtime.keep_grad && keeps_whole_states(&rule),
       "deeptide.keep_grad shows the ranks' mean gradient, which " + rule.name() + " does not form in steps by signs; ",
       "leave keep_grad out, or choose another optimizer"},
      {wants_files(config.placement().gradients) && is_callers(&rule),
       "deeptide.placement.gradients in files is for the optimizers of deeptide: one of your own takes its gradients "
       "from memory. ",
       "Leave them there, or name the optimizer in the configuration"},
      {quantized_bits(config) > 0 && !model.device.is_cpu(),
       "quantized gradients are not supported yet on " + model.device.str() + "; ",
       "leave deeptide.quantized_gradients and zero_quantized_gradients out"},
      {quantized_bits(config) > 0 && keeps_whole_states(&rule),
       "quantized gradients do not go with " + rule.name() + ", whose ranks exchange signs; ",
       "leave deeptide.quantized_gradients and zero_quantized_gradients out, or choose another optimizer"},
  };
}

void refuse_tenancies(const Config& config, const Topology& topology, const optim::Rule* rule, bool steps_whole) {
  const bool has_experts = topology.mesh.size(world::Axis::expert) > 1;
  const bool has_copies = std::ranges::any_of(topology.tenancies, [](const Tenancy& tenancy) {
    return tenancy.shard_over != tenancy.reduce_over;  // a slice has several owners
  });
  const std::string subject = "units on axes of their own do not go with ";
  const std::string optimizer = subject + (rule ? rule->name() : "");
  const RuntimeConfig& runtime = config.runtime();
  check(config, {{keeps_whole_states(rule) && (has_experts || has_copies),
                  optimizer + ", whose ranks exchange signs, yet; ", "choose another optimizer"},
                 {is_callers(rule) && steps_whole, optimizer + ", your own, which steps whole parameters; ",
                  "choose one that steps each element by itself, or name one of deeptide's in the configuration"},
                 {runtime.reduction != Reduction::ordered, subject + "a reduction in the transport's order; ",
                  "set deeptide.reduction to \"ordered\""},
                 {runtime.keep_grad && has_experts, subject + "deeptide.keep_grad yet; ", "leave it out"},
                 {runtime.overlap_publish.value_or(false), subject + "deeptide.overlap_publish yet; ", "leave it out"},
                 {runtime.drift_interval > 0, subject + "deeptide.drift_interval yet; ", "leave it out"}});
}

}  // namespace

void refuse(const Config& config, const ModelFacts& model, const optim::Rule* rule) {
  const int64_t stage = config.zero().stage;
  check(config, {{wants_files(config.placement().gradients) && !model.device.is_cpu(),
                  format_text("deeptide.placement.gradients in files is not supported yet on {}; ", model.device.str()),
                  "give the host's memory, \"cpu\", what the device does not have"},
                 {stage > 0 && keeps_whole_states(rule),
                  format_text("zero_optimization.stage is {}, but {} needs stage 0: each rank steps whole parameters, "
                              "with a momentum of its own gradients. ",
                              stage, rule ? rule->name() : ""),
                  "Set the stage to 0, or choose another optimizer"}});
  check(config, of_parameters(config, model, rule));
  if (rule == nullptr) return;
  check(config, of_host_steps(config, model, *rule));
  check(config, of_state_types(config, model, *rule));
  check(config, of_training(config, model, *rule));
}

void refuse_axes(const Config& config, const Topology& topology, const optim::Rule* rule, bool steps_whole) {
  if (!topology.tenancies.empty()) refuse_tenancies(config, topology, rule, steps_whole);
}

void refuse(const Config& config, const ModelFacts& model, const optim::Rule& rule, const Outcome& outcome) {
  const bool leave = outcome.gradients_share > 0.0, uses_host = outcome.states_share > 0.0;
  const std::string subject = format_text("deeptide.placement.gradients off {} does not go with ", model.device.str());
  const std::string or_else = ", or give the device \"100%\"";
  check(config,
        {{leave && !outcome.steps_shard,
          subject + "stage 0, where each rank steps all and gathers the sums on the device; ",
          "choose a stage from 1 on" + or_else},
         {leave && config.runtime().keep_grad,
          subject + "deeptide.keep_grad, which keeps whole gradients on the device; ", "leave keep_grad out" + or_else},
         {leave && !uses_host && is_callers(&rule), subject + "an optimizer of your own that steps on the device; ",
          "add offload_optimizer" + or_else},
         {leave && uses_host &&
              (measures_ratio(config) || std::abs(outcome.gradients_share - outcome.states_share) > 1e-9),
          subject + format_text("optimizer states of which the host steps {:g} %, and takes these gradients; ",
                                100.0 * outcome.states_share),
          "leave the placement out" + or_else},
         {outcome.states_in_files && config.runtime().on_skipped == OnSkipped::rewind,
          "deeptide.on_skipped \"rewind\" keeps a copy of the states in memory, which does not go with states in files "
          "(zero_optimization.offload_optimizer, deeptide.placement.optimizer_states); ",
          "choose \"skip\" or \"raise\""}});
}

}  // namespace deeptide::engine
