// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's data types: fp16, bf16, torch_autocast, amp, data_types.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key fp16_section() {
  return section(
             "fp16", "Half precision with loss scaling.",
             {
                 flag("enabled", false, "Compute in fp16.").into(&PrecisionConfig::fp16),
                 flag("auto_cast", false, "Cast floating inputs of the model to fp16 (Python).")
                     .into(&PrecisionConfig::auto_cast),
                 number("loss_scale", 0.0, "A fixed scale; 0: dynamic.").at_least(0).into(&PrecisionConfig::loss_scale),
                 integer("initial_scale_power", 16, "The dynamic scale starts at 2 to this power.")
                     .at_least(0)
                     .into(&PrecisionConfig::initial_scale_power),
                 integer("loss_scale_window", 1000, "Good steps before the scale doubles.")
                     .at_least(1)
                     .into(&PrecisionConfig::loss_scale_window),
                 integer("hysteresis", 2, "Overflows before the scale is halved.")
                     .at_least(1)
                     .into(&PrecisionConfig::hysteresis),
                 flag("consecutive_hysteresis", false, "Any good step restores the hysteresis.")
                     .into(&PrecisionConfig::consecutive_hysteresis),
                 integer("min_loss_scale", 1, "The dynamic scale's lower bound; 0 means 1.")
                     .at_least(0)
                     .into(&PrecisionConfig::min_loss_scale),
                 flag("fp16_master_weights_and_grads", false,
                      "No fp32 masters: parameters are stepped in fp32 and rounded; sums of gradients are fp16.")
                     .into(&PrecisionConfig::fp16_masters),
             })
      .switched_by("enabled");
}

Key bf16_section() {
  return section(
             "bf16", "bfloat16 parameters and activations with fp32 masters.",
             {
                 flag("enabled", false, "Compute in bf16.").into(&PrecisionConfig::bf16),
                 flag("immediate_grad_update", false, "Accumulate into fp32 in the gradient's hook.")
                     .either("gradients are taken as backward yields each, and their sums are fp32"),
                 flag("check_grad_overflow", true, "Check gradients for NaN and Inf.")
                     .never("the pass that computes the norm always checks for NaN and Inf"),
                 flag("bf16_master_weights_and_grads", false,
                      "No fp32 masters: parameters are stepped in fp32 and rounded; sums of gradients are bf16.")
                     .into(&PrecisionConfig::bf16_masters),
                 flag("bf16_optimizer_states", false,
                      "Moments in bf16; needs bf16_master_weights_and_grads. Adam's second moment does not decay at a "
                      "beta2 of 0.999.")
                     .into(&PrecisionConfig::bf16_moments),
             })
      .alias("bfloat16")
      .switched_by("enabled");
}

Key torch_autocast_section() {
  return section("torch_autocast", "torch.autocast around the forward pass.",
                 {
                     enabled().into(&PrecisionConfig::autocast),
                     choice<DataType>("dtype", DataType::bf16,
                                      {{"bfloat16", DataType::bf16},
                                       {"float16", DataType::fp16},
                                       {"torch.bfloat16", DataType::bf16},
                                       {"torch.float16", DataType::fp16},
                                       {"bf16", DataType::bf16},
                                       {"fp16", DataType::fp16},
                                       {"half", DataType::fp16}},
                                      "Its lower type. float16 scales losses as torch's GradScaler does, with a scale "
                                      "that halves at each overflow and "
                                      "doubles after 2,000 good steps; keys given in the fp16 section say otherwise.")
                         .into(&PrecisionConfig::autocast_dtype),
                     list("lower_precision_safe_modules", Kind::word,
                          words({"torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"}),
                          "Modules whose parameters are communicated in the lower type.")
                         .never("gradients travel in communication_data_type, which is one for all parameters"),
                 })
      .switched_by("enabled");
}

Key data_types_section() {
  return section("data_types", "Data types of single roles.",
                 {
                     choice<DataType>("grad_accum_dtype", {}, data_types(),
                                      "Data type of sums of gradients: fp32, or the compute type.")
                         .derives("fp32, or that of 16-bit masters")
                         .into(&PrecisionConfig::gradient_accumulation_dtype),
                     choice<DataType>("param_dtype", {}, data_types(), "Data type of parameters: only checked.")
                         .derives("the compute type")
                         .read_by("rules.cc, which refuses another than the compute type"),
                     choice<DataType>("buffer_dtype", {}, data_types(),
                                      "Under fp16 and bf16, the data type of floating buffers. Without it one in fp32 "
                                      "stays so, as in DeepSpeed, and what a forward makes of it and of a 16-bit "
                                      "tensor is fp32. Those of a norm with running statistics stay fp32 as it does.")
                         .derives("each keeps its own")
                         .into(&PrecisionConfig::buffer_dtype),
                     list("keep_in_fp32_modules", Kind::word, {},
                          "Under fp16 and bf16, patterns: a buffer in whose name one occurs is fp32, whatever "
                          "buffer_dtype says. * stands for any characters.")
                         .derives("what a Transformers model names in _keep_in_fp32_modules_strict, and in fp16 in "
                                  "_keep_in_fp32_modules")
                         .into(&PrecisionConfig::keep_in_fp32),
                 });
}

}  // namespace

std::vector<std::pair<std::string_view, DataType>> data_types() {
  return {{"fp32", DataType::fp32},          {"fp16", DataType::fp16},          {"bf16", DataType::bf16},
          {"float32", DataType::fp32},       {"float16", DataType::fp16},       {"bfloat16", DataType::bf16},
          {"float", DataType::fp32},         {"half", DataType::fp16},          {"torch.float32", DataType::fp32},
          {"torch.float16", DataType::fp16}, {"torch.bfloat16", DataType::bf16}};
}

std::vector<Key> precision_sections() {
  return {fp16_section(), bf16_section(), torch_autocast_section(),
          section("amp", "NVIDIA apex; the other keys go to apex.amp.initialize.",
                  {enabled(), choice("opt_level", {}, {"O0", "O1", "O2", "O3"}, "Its level.")})
              .leaves_open()
              .switched_by("enabled")
              .later("there is no Apex here: \"bf16\", \"fp16\" or \"torch_autocast\" do what it did"),
          data_types_section()};
}

}  // namespace deeptide::config
