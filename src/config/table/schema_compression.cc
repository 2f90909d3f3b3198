// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's compression: compression_training, quantize_training.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

const char* const kSwitch = "shared_parameters.enabled";

Key enabled() { return flag("enabled", false, "Use it."); }

Key offset(int64_t steps) { return integer("schedule_offset", steps, "First step.").at_least(0); }

Key quantization_type() {
  return choice("quantization_type", "symmetric", {"symmetric", "asymmetric"}, "Kind of quantisation.");
}

// A technique: parameters that all its groups share, and groups of modules by free names.
Key technique(std::string name, std::string doc, std::vector<Key> shared, std::vector<Key> params) {
  return section(std::move(name), std::move(doc),
                 {section("shared_parameters", "For all groups.", std::move(shared)),
                  dictionary("different_groups", "Groups of modules by name.",
                             {section("params", "Of this group.", std::move(params)),
                              list("modules", Kind::word, words({"*"}), "Modules of this group."),
                              list("related_modules", Kind::anything, {}, "Modules that change with them.")})})
      .switched_by(kSwitch)
      .later();
}

Key ratio() { return number("dense_ratio", {}, "Share that stays.").between(0, 1); }

Key layer_reduction() {
  return section("layer_reduction", "A student with fewer layers.",
                 {
                     enabled(),
                     integer("keep_number_layer", {}, "Layers kept.").at_least(1),
                     word("module_name_prefix", {}, "Where the layers are."),
                     list("teacher_layer", Kind::integer, {}, "Layers to begin with."),
                     list("other_module_name", Kind::word, {}, "Other modules to copy."),
                 })
      .switched_by("enabled")
      .later();
}

Key weight_quantization() {
  return technique("weight_quantization", "Quantisation-aware training of weights.",
                   {
                       enabled(),
                       flag("quantizer_kernel", false, "By CUDA kernels."),
                       offset(0),
                       integer("quantize_groups", 1, "Groups of weights.").at_least(1),
                       flag("quantize_verbose", false, "Print what is done."),
                       quantization_type(),
                       choice("rounding", "nearest", {"nearest", "stochastic"}, "Rounding."),
                       flag("quantize_weight_in_forward", false, "In the forward pass rather than in the step."),
                       section("fp16_mixed_quantize", "A mixture with fp16.",
                               {enabled(), number("quantize_change_ratio", 0.001, "Change per step.").between(0, 1)}),
                   },
                   {
                       integer("start_bits", {}, "Bits at first.").at_least(1),
                       integer("target_bits", {}, "Bits at last.").at_least(1),
                       integer("quantization_period", 1, "Steps between changes.").at_least(1),
                   });
}

Key activation_quantization() {
  return technique(
      "activation_quantization", "Quantisation of activations.",
      {enabled(), quantization_type(),
       choice("range_calibration", "dynamic", {"dynamic", "static"}, "Where ranges come from."), offset(1000)},
      {integer("bits", {}, "Bits.").at_least(1)});
}

Key sparse_pruning() {
  return technique("sparse_pruning", "Pruning of single weights.",
                   {
                       enabled(),
                       choice("method", "l1", {"l1", "topk", "snip_momentum"}, "How weights are chosen."),
                       offset(1000),
                       integer("schedule_offset_end", {}, "Last step.").at_least(0),
                       integer("schedule_offset_stride", 1, "Steps between.").at_least(1),
                       word("block_pattern", "4x1", "Blocks."),
                       number("dense_ratio", 0.1, "Share that stays.").between(0, 1),
                       list("excluded_modules", Kind::word, words({}), "Modules left alone."),
                   },
                   {ratio()});
}

Key pruning(std::string name, std::string doc, std::vector<Key> more) {
  std::vector<Key> shared = {enabled(), choice("method", "l1", {"l1", "topk"}, "How they are chosen."), offset(1000)};
  shared.insert(shared.end(), more.begin(), more.end());
  return technique(std::move(name), std::move(doc), std::move(shared), {ratio()});
}

Key eigenvalue() {
  return section("eigenvalue", "Curvature that steers the quantisation; DeepSpeed has it disabled.",
                 {
                     enabled(),
                     flag("verbose", false, "Print it."),
                     integer("max_iter", 100, "Iterations.").at_least(1),
                     number("tol", 1e-2, "Tolerance.").at_least(0),
                     number("stability", 1e-6, "Added for stability.").at_least(0),
                     integer("gas_boundary_resolution", 1, "Steps between.").at_least(1),
                     word("layer_name", "bert.encoder.layer", "Layers."),
                     integer("layer_num", 0, "How many.").at_least(0),
                     word("model_name", {}, "Name of the model, for its reports."),
                 })
      .switched_by("enabled")
      .never("it only steers the quantisation of weights, which is an error");
}

}  // namespace

std::vector<Key> compression_sections() {
  return {
      section("compression_training", "Training of smaller models.",
              {
                  layer_reduction(),
                  weight_quantization(),
                  activation_quantization(),
                  sparse_pruning(),
                  pruning("row_pruning", "Pruning of rows.", {}),
                  pruning("head_pruning", "Pruning of attention heads.",
                          {integer("num_heads", {}, "Heads of a layer.").at_least(1)}),
                  pruning("channel_pruning", "Pruning of channels.", {}),
              }),
      section("quantize_training", "Quantisation of weights in the optimizer's step.", {enabled(), eigenvalue()})
          .leaves_open()
          .switched_by("enabled")
          .later("its later form is compression_training.weight_quantization"),
      eigenvalue(),
  };
}

}  // namespace deeptide::config
