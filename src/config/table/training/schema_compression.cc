// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's compression: compression_training, quantize_training.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

const char* const kSwitch = "shared_parameters.enabled";

Key offset(int64_t steps) {
  return integer("schedule_offset", steps, "It begins after so many optimizer steps.").at_least(0);
}

Key quantization_type() {
  return choice("quantization_type", "symmetric", {"symmetric", "asymmetric"}, "Kind of quantisation.");
}

Key rounding() { return choice("rounding", "nearest", {"nearest", "stochastic"}, "Rounding."); }

Key mixture() {
  return section(
      "fp16_mixed_quantize", "A mixture of rounded weights with those that are not.",
      {enabled(),
       number("quantize_change_ratio", 0.001, "The share of those that are not falls by it in a step.").between(0, 1)});
}

// A technique: parameters that all its groups share, and groups of modules by free names.
Key technique(std::string name, std::string doc, std::vector<Key> shared, std::vector<Key> params) {
  return section(std::move(name), std::move(doc),
                 {section("shared_parameters", "For all groups.", std::move(shared)),
                  dictionary("different_groups", "Groups of modules by name.",
                             {section("params", "Of this group.", std::move(params)),
                              list("modules", Kind::word, words({"*"}),
                                   "Regular expressions, each found in the names of modules of this group; *: all."),
                              list("related_modules", Kind::anything, {},
                                   "For each of modules, a list of expressions: modules that redundancy_clean shrinks "
                                   "along with them.")})})
      .switched_by(kSwitch);
}

Key ratio() { return number("dense_ratio", {}, "Share that stays.").between(0, 1); }

Key layer_reduction() {
  return section("layer_reduction", "A student with fewer layers, which begins as some of its teacher's.",
                 {
                     enabled(),
                     integer("keep_number_layer", {}, "Layers of the student.").at_least(1),
                     word("module_name_prefix", {}, "The module that holds the layers by number, in both models."),
                     list("teacher_layer", Kind::integer, {}, "The teacher's layers, in the student's order."),
                     list("other_module_name", Kind::word, {}, "Other modules to copy."),
                 })
      .switched_by("enabled");
}

Key weight_quantization() {
  return technique(
      "weight_quantization", "Quantisation-aware training of weights.",
      {
          enabled(),
          flag("quantizer_kernel", false, "By CUDA kernels.").never("torch's operators round"),
          offset(0),
          integer("quantize_groups", 1, "Groups of a weight's elements, each with its own scale.").at_least(1),
          flag("quantize_verbose", false, "Print each change of bits."),
          quantization_type(),
          rounding(),
          flag("quantize_weight_in_forward", false,
               "true: rounded to target_bits; false: to bits that fall over the steps (MoQ)."),
          mixture(),
      },
      {
          integer("start_bits", {}, "Bits at first.").at_least(1),
          integer("target_bits", {}, "Bits at last.").at_least(1),
          integer("quantization_period", 1, "Steps until the bits fall first; doubles each time.").at_least(0),
      });
}

Key activation_quantization() {
  return technique("activation_quantization", "Quantisation of activations.",
                   {enabled(), quantization_type(),
                    choice("range_calibration", "dynamic", {"dynamic", "static"},
                           "dynamic: a range of its own for each token; static: a moving average while training."),
                    offset(1000)},
                   {integer("bits", {}, "Bits.").at_least(1)});
}

Key of_snip_momentum(Key key) { return std::move(key).never("belongs to the method snip_momentum"); }

Key sparse_pruning() {
  return technique("sparse_pruning", "Pruning of single weights.",
                   {
                       enabled(),
                       choice("method", "l1", {"l1", "topk", "snip_momentum"},
                              "l1: the largest weights at the start stay; topk: those of the best scores, which are "
                              "trained.")
                           .not_yet({"snip_momentum"}, "DeepSpeed called a package for it that was never published"),
                       offset(1000),
                       of_snip_momentum(integer("schedule_offset_end", {}, "Last step.").at_least(0)),
                       of_snip_momentum(integer("schedule_offset_stride", 1, "Steps between.").at_least(1)),
                       of_snip_momentum(word("block_pattern", "4x1", "Blocks.")),
                       of_snip_momentum(number("dense_ratio", 0.1, "Share that stays.").between(0, 1)),
                       of_snip_momentum(list("excluded_modules", Kind::word, words({}), "Modules left alone.")),
                   },
                   {ratio()});
}

Key pruning(std::string name, std::string doc, std::vector<Key> more) {
  std::vector<Key> shared = {enabled(),
                             choice("method", "l1", {"l1", "topk"},
                                    "l1: those of the largest weights at the start stay; topk: those of the "
                                    "best scores, which are trained."),
                             offset(1000)};
  shared.insert(shared.end(), more.begin(), more.end());
  return technique(std::move(name), std::move(doc), std::move(shared), {ratio()});
}

Key eigenvalue() {
  return section("eigenvalue", "Blocks whose loss curves least lose their bits soonest: eigenvalues of their Hessians.",
                 {
                     enabled(),
                     flag("verbose", false, "Print each eigenvalue."),
                     integer("max_iter", 100, "Most iterations for a block.").at_least(1),
                     number("tol", 1e-2, "Relative change at which they end.").at_least(0),
                     number("stability", 1e-6, "Added to a norm that divides.").at_least(0),
                     integer("gas_boundary_resolution", 1, "Optimizer steps between computations.").at_least(1),
                     word("layer_name", "bert.encoder.layer", "The module that holds the blocks by number."),
                     integer("layer_num", 0, "How many blocks.").at_least(0),
                     word("model_name", {}, "Name of the model.").never("no report names it"),
                 })
      .switched_by("enabled");
}

// DeepSpeed's form up to 0.5, for all layers.
Key quantize_training() {
  return section(
             "quantize_training",
             "Weights of all layers with bits that fall over the steps (MoQ); needs no init_compression.",
             {
                 enabled(),
                 flag("quantize_verbose", false, "Print each change of bits."),
                 flag("quantizer_kernel", false, "By CUDA kernels.").never("torch's operators round"),
                 section("quantize_bits", "Bits of a weight.",
                         {integer("start_bits", 16, "At first.").at_least(1),
                          integer("target_bits", 8, "At last.").at_least(1)}),
                 section(
                     "quantize_schedule", "When bits fall.",
                     {integer("quantize_period", 1000, "Steps until they fall first; doubles each time.").at_least(0),
                      offset(1000)}),
                 integer("quantize_groups", 1, "Groups of a weight's elements, each with its own scale.").at_least(1),
                 section(
                     "quantize_algo", "How weights are rounded.",
                     {choice("q_type", "symmetric", {"symmetric", "asymmetric"}, "Kind of quantisation."), rounding()})
                     .alias("quantize-algo"),
                 mixture(),
                 eigenvalue(),
             })
      .switched_by("enabled")
      .read_by("python/deeptide/compression");
}

}  // namespace

std::vector<Key> compression_sections() {
  return {
      section("compression_training", "Training of smaller models, which init_compression prepares.",
              {
                  layer_reduction(),
                  weight_quantization(),
                  activation_quantization(),
                  sparse_pruning(),
                  pruning("row_pruning", "Pruning of outputs of linear layers.", {}),
                  pruning("head_pruning", "Pruning of attention heads: of inputs of the output matrix, by topk alone.",
                          {integer("num_heads", {}, "Heads of a layer.").at_least(1)}),
                  pruning("channel_pruning", "Pruning of outputs of convolutions.", {}),
              })
          .read_by("python/deeptide/compression"),
      quantize_training(),
      eigenvalue().never("DeepSpeed reads it inside quantize_training alone"),
  };
}

}  // namespace deeptide::config
