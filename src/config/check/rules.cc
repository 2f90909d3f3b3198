// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rules between keys, which the table of single keys cannot express.
#include "config/check/rules.h"

#include "config/check/placement.h"

namespace deeptide::config {
namespace {

const std::string kParams = "optimizer.params.";

void blame(const Values& values, const std::string& path, const std::string& what, Problems& problems) {
  const Entry& entry = values.at(path);
  problems.add(entry.line, entry.shown, what);
}

void check_precision(const Values& values, Problems& problems) {
  if (values.flag("fp16.enabled") && values.flag("bf16.enabled")) {
    blame(values, "bf16.enabled",
          "bfloat16 and fp16 modes cannot be simultaneously enabled; set fp16.enabled or bf16.enabled to false",
          problems);
  }
  if (!values.flag("torch_autocast.enabled")) return;
  if (values.flag("fp16.enabled")) {
    blame(values, "fp16.enabled",
          "true contradicts torch_autocast, which keeps parameters in fp32; set one of them to false", problems);
  }
  const std::string lower = values.word("torch_autocast.dtype");
  const bool is_bf16 = lower == "bfloat16" || lower == "torch.bfloat16" || lower == "bf16";
  if (values.flag("bf16.enabled") && !is_bf16) {  // operators that autocast leaves alone run in the parameters' type
    blame(values, "bf16.enabled",
          "true contradicts torch_autocast.dtype \"" + lower + "\": name bfloat16 there, or set one of them to false",
          problems);
  }
}

void check_parameters(const Values& values, Problems& problems) {
  const std::string asked = values.usual_word("data_types.param_dtype");
  const std::string compute = values.flag("bf16.enabled") ? "bf16" : values.flag("fp16.enabled") ? "fp16" : "fp32";
  if (asked.empty() || asked == compute) return;
  blame(values, "data_types.param_dtype",
        "\"" + asked + "\" contradicts the sections fp16 and bf16, which ask for " + compute +
            "; leave it out, or set \"enabled\" of the section of that type",
        problems);
}

void check_sums_and_masters(const Values& values, Problems& problems) {
  const std::string sums = values.usual_word("data_types.grad_accum_dtype");
  for (const std::string type : {"fp16", "bf16"}) {
    const std::string masters = type + "." + type + "_master_weights_and_grads";
    const bool on = values.flag(type + ".enabled");
    if (sums == type && !on) {
      blame(values, "data_types.grad_accum_dtype",
            "\"" + type + "\" needs " + type + ".enabled: sums are fp32, or of the compute type", problems);
    }
    if (sums == "fp32" && on && values.flag(masters)) {
      blame(
          values, "data_types.grad_accum_dtype",
          "\"fp32\" contradicts " + masters + ", with which sums of gradients are " + type + "; leave one of them out",
          problems);
    }
  }
  if (values.flag("bf16.enabled") && values.flag("bf16.bf16_optimizer_states") &&
      !values.flag("bf16.bf16_master_weights_and_grads")) {
    blame(values, "bf16.bf16_optimizer_states",
          "true needs bf16_master_weights_and_grads, as in DeepSpeed; set that to true, or this to false", problems);
  }
}

void check_states(const Values& values, Problems& problems) {
  const bool bf16 = values.flag("bf16.enabled");
  const bool rounded = bf16 && values.flag("bf16.bf16_master_weights_and_grads");
  if (values.flag("deeptide.packed_states") && !bf16) {
    blame(values, "deeptide.packed_states",
          "true needs bf16.enabled: the upper half of an fp32 master is a bf16 parameter; set that to true, or this to "
          "false",
          problems);
  } else if (values.flag("deeptide.packed_states") && rounded) {
    blame(values, "deeptide.packed_states",
          "true contradicts bf16.bf16_master_weights_and_grads, with which there are no fp32 masters; set one of them "
          "to false",
          problems);
  }
  if (values.word("deeptide.moment_dtype") == "bf16" && bf16 && values.flag("bf16.bf16_optimizer_states")) {
    blame(values, "deeptide.moment_dtype",
          "\"bf16\" contradicts bf16.bf16_optimizer_states: the one rounds stochastically, the other to nearest; leave "
          "one of them out",
          problems);
  }
}

void check_reduction(const Values& values, Problems& problems) {
  if (values.word("gradient_allreduce_op") == "sum" && values.integer("zero_optimization.stage") == 3) {
    blame(values, "gradient_allreduce_op",
          "\"sum\" is not supported with ZeRO stage 3; use \"mean\" or a stage from 0 to 2", problems);
  }
  const std::string width = values.word("deeptide.quantized_gradients");
  const bool asked = values.flag("zero_optimization.zero_quantized_gradients");
  if (asked && width == "off") {
    blame(values, "deeptide.quantized_gradients",
          "\"off\" contradicts zero_optimization.zero_quantized_gradients; leave one of them out", problems);
  }
  if (!asked && (width.empty() || width == "off")) {
    if (values.flag("deeptide.quantized_error_feedback")) {
      blame(values, "deeptide.quantized_error_feedback",
            "needs deeptide.quantized_gradients \"int8\" or \"int4\": gradients that travel whole leave no error",
            problems);
    }
    return;
  }
  const std::string key = width.empty() ? "zero_optimization.zero_quantized_gradients" : "deeptide.quantized_gradients";
  if (values.word("deeptide.reduction") == "transport") {
    blame(values, key, "needs deeptide.reduction \"ordered\": a transport cannot sum quantized gradients", problems);
  }
  if (const std::string type = values.usual_word("communication_data_type"); !type.empty()) {
    blame(values, "communication_data_type",
          "\"" + type + "\" contradicts " + key + ", which says how gradients travel; leave one of them out", problems);
  }
}

/// A size: bytes, or a text such as "6GiB".
bool is_size(const JsonValue& value) {
  if (value.is(JsonKind::integer) || value.is(JsonKind::number)) return value.number >= 1;
  return value.is(JsonKind::string) && parse_bytes(value.string).value_or(0) > 0;
}

void check_activations(const Values& values, Problems& problems) {
  const std::string memory = "activation_checkpointing.memory";
  if (!values.given(memory)) return;
  if (!values.at("activation_checkpointing.policy").automatic) {
    blame(values, memory, "is the budget of activation_checkpointing.policy \"auto\"; set that, or leave this out",
          problems);
  } else if (!is_size(values.value(memory))) {
    blame(values, memory, "expected a size above 0, such as \"6GiB\" or a number of bytes", problems);
  }
}

void check_optimizer(const Values& values, Problems& problems) {
  const std::string type = values.word("optimizer.type");
  if (type == "SGD" && values.flag(kParams + "nesterov") &&
      (values.number(kParams + "momentum") <= 0 || values.number(kParams + "dampening") != 0)) {
    blame(values, kParams + "nesterov", "Nesterov momentum requires a momentum above 0 and zero dampening", problems);
  }
  const bool has_ratio = type == "Lamb" || type == "OneBitLamb";
  if (has_ratio && values.number(kParams + "min_coeff") > values.number(kParams + "max_coeff")) {
    blame(values, kParams + "min_coeff", "the lower bound of the trust ratio is above max_coeff, the upper one",
          problems);
  }
}

void check_elasticity(const Values& values, Problems& problems) {
  if (!values.flag("elasticity.enabled")) return;
  if (values.flag("elasticity.ignore_non_elastic_batch_info")) return;
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    if (!values.given(key)) continue;
    blame(values, key,
          "has no effect because elastic training is enabled and determines the batch sizes; leave it out, or "
          "set elasticity.ignore_non_elastic_batch_info to true",
          problems);
  }
}

void note_optimizer(const Values& values, std::vector<std::string>& decisions) {
  const std::string type = values.word("optimizer.type");
  if (type == "AdamW" && !values.flag(kParams + "adam_w_mode")) {
    decisions.push_back(
        "optimizer.type: \"AdamW\" decouples weight decay, also with adam_w_mode: false, as in DeepSpeed; "
        "\"Adam\" gives L2 decay");
  }
  if (type != "Adam") return;
  decisions.push_back(values.flag(kParams + "adam_w_mode")
                          ? "optimizer.type: \"Adam\" decouples weight decay (AdamW); adam_w_mode: false is L2 decay"
                          : "optimizer.type: \"Adam\" with adam_w_mode: false adds L2 decay to the gradient");
}

void note_loss_scale(const Values& values, std::vector<std::string>& decisions) {
  const bool dynamic = values.flag("fp16.enabled") && values.number("fp16.loss_scale") == 0;
  if (dynamic && values.integer("fp16.min_loss_scale") == 0) {
    decisions.push_back("fp16.min_loss_scale: 0 means 1, for the loss scale would vanish");
  }
}

void note_schedule(const Values& values, std::vector<std::string>& decisions) {
  const std::string type = values.word("scheduler.type");
  if (type != "WarmupDecayLR" && type != "WarmupCosineLR") return;
  const int64_t total = values.integer("scheduler.params.total_num_steps");
  const int64_t warmup = values.integer("scheduler.params.warmup_num_steps");
  if (total < warmup) {
    decisions.push_back("scheduler.params: total_num_steps " + std::to_string(total) +
                        " is less than warmup_num_steps " + std::to_string(warmup) + ", so the warm-up will not end");
  }
}

}  // namespace

void check_rules(const Values& values, PlacementConfig& placement, Problems& problems) {
  check_precision(values, problems);
  check_parameters(values, problems);
  check_sums_and_masters(values, problems);
  check_states(values, problems);
  check_reduction(values, problems);
  check_elasticity(values, problems);
  check_activations(values, problems);
  read_placement(values, placement, problems);
  // After other problems the optimizer's parameters may be unknown.
  if (problems.empty()) check_optimizer(values, problems);
}

void note_decisions(const Values& values, std::vector<std::string>& decisions) {
  note_optimizer(values, decisions);
  note_schedule(values, decisions);
  note_loss_scale(values, decisions);
  constexpr const char* kOfOptimizer = "optimizer.params.max_grad_norm";
  const bool clips_in_optimizer = values.has(kOfOptimizer) && values.given(kOfOptimizer);
  if (!values.at("gradient_clipping").automatic && !values.given("gradient_clipping") && !clips_in_optimizer) {
    decisions.push_back("gradient_clipping: not given, so 1 as in DeepSpeed; 0 turns clipping off");
  }
  const auto vocabulary = values.maybe_integer("vocabulary_size");
  if (vocabulary && *vocabulary % 8 != 0) {
    decisions.push_back("vocabulary_size: " + std::to_string(*vocabulary) +
                        " is not a multiple of 8, which may slow matrix products down");
  }
}

}  // namespace deeptide::config
