// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's parallelism: pipeline, tensor_parallel, expert_parallel.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key pipeline_section() {
  const char* const by_module =
      "the arguments of PipelineModule rule; parallel.pipeline and parallel.schedule are read";
  return section("pipeline", "Pipelines of a PipelineModule.",
                 {
                     integer("stages", {}, "Stages.").at_least(1).never(by_module),
                     word("partition", "best", "How layers are shared out.").never(by_module),
                     flag("seed_layers", false, "Seed each layer by its number.").never(by_module),
                     integer("activation_checkpoint_interval", 0,
                             "Layers that are recomputed together in backward; 0: as many as the module says.")
                         .at_least(0),
                     flag("pipe_partitioned", true, "Share out activations between stages.").never(by_module),
                     flag("grad_partitioned", true, "Share out gradients between stages.").never(by_module),
                     flag("use_reentrant", true, "Reentrant checkpoints.")
                         .never("recomputation is without reentrance, which gives the same numbers"),
                 })
      .read_by("deeptide.pipeline.PipelineEngine");
}

Key parallel_section() {
  return section(
             "parallel", "How ranks divide into axes. Those of one stage share its layers by ZeRO.",
             {
                 section(
                     "pipeline", "Stages of a pipeline; a number stands for that of stages.",
                     {integer("stages", {}, "Stages. A PipelineModule has as many; other models are cut.").at_least(1),
                      list("cut", Kind::word, words({"by_block"}),
                           "by_block: stages get consecutive blocks, by their parameters; by_operator: consecutive "
                           "calls of any modules; or names of the blocks with which the stages after the first begin, "
                           "and with chunks their later runs.")
                          .or_one(),
                      choice("outputs", "last", {"last", "broadcast"},
                             "Stages that get what a forward of the program's own, or an evaluation, returns besides "
                             "the loss: the last one, or all.")})
                     .or_first_key(),
                 integer("tensor", 1, "Ranks that share each layer, neighbours on one host.").at_least(1),
                 integer("data", {}, "Ranks that train on different batches.")
                     .at_least(1)
                     .derives("what pipeline and tensor leave"),
                 flag("tensor_check", true,
                      "Compare outputs and all gradients of a small run of the model that is cut with the whole "
                      "model's, at the start."),
                 flag(
                     "sequence_parallel_norms", false,
                     "Between attention and MLP of a model that is cut, each rank that shares layers has a part of the "
                     "positions: norms, dropout and what they keep for backward."),
                 choice("schedule", "1f1b", {"1f1b", "gpipe", "interleaved", "zero_bubble"},
                        "Order of a stage's work. 1f1b: a forward and a backward in turn; gpipe: all forwards first; "
                        "interleaved: 1f1b over several chunks of the model on each stage; zero_bubble: 1f1b whose "
                        "gradients of weights are computed while a stage would wait."),
                 integer("chunks", {}, "Runs of blocks on each stage, by the interleaved schedule.")
                     .at_least(1)
                     .derives("2 with the interleaved schedule, else 1"),
             })
      .read_by("deeptide.pipeline.PipelineEngine");
}

Key layer_specs() {
  return list("layer_specs", Kind::anything, std::vector<JsonValue>{},
              "Objects of patterns, partition_type, shape, partition_dim, model_types, gather_output, grad_allreduce.");
}

constexpr const char* kOwnLogits = "a causal model's loss is computed from each rank's own logits";

Key tensor_parallel_section() {
  const char* const own_plan = "the model's own plan, or the rule of names, cuts its layers";
  return section(
             "tensor_parallel", "Tensor parallelism by DeepSpeed's AutoTP: what parallel.tensor says.",
             {
                 choice("dtype", "fp16", {"fp32", "fp16", "bf16"}, "Data type.").never("the model has its own"),
                 integer("autotp_size", 0, "Ranks that share each layer, as parallel.tensor; 0: off.").at_least(0),
                 flag("tp_overlap_comm", false, "Overlap its communication.")
                     .never("a sum of gradients always travels while those of weights are computed"),
                 flag("vocab_parallel_lm_head", {}, "Cut the head by words.").never(kOwnLogits),
                 choice("vocab_parallel_ce_backend", "torch", {"torch", "liger"}, "Its loss.").never(kOwnLogits),
                 section("tensor_parallel", "Its group.",
                         {integer("tp_size", 1, "Ranks, where autotp_size is 0.").at_least(1),
                          integer("tp_grain_size", 1, "Smallest share.").at_least(1).never("shares are equal"),
                          anything("mpu", "An object of the program.").later("give it to initialize"),
                          anything("tp_group", "An object of the program.").later()})
                     .alias("tp"),
                 anything("injection_policy_tuple", "Layers by hand.").later("use partition_config"),
                 section("partition_config", "Layers by pattern.",
                         {flag("use_default_specs", true, "Begin with the built-in ones."), layer_specs()}),
                 choice("preset_model", {}, {"llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"},
                        "Known model.")
                     .never(own_plan),
                 flag("keep_module_on_host", false, "Keep the module in CPU memory.").never("it stays where it is"),
                 flag("replace_with_kernel_inject", false, "Inject inference kernels.").alias("kernel_inject").later(),
             })
      .read_by("deeptide.tensor");
}

std::vector<Key> router_keys() {
  return {
      word("moe_layer_pattern", {}, "Names of MoE layers."),
      word("router_pattern", {}, "Names of routers."),
      word("expert_pattern", {}, "Names of experts."),
      word("score_func", {}, "Scores of the router."),
      word("score_apply", {}, "Where scores apply."),
      flag("route_norm", {}, "Normalise the scores."),
      number("route_scale", 1.0, "Scale of the scores."),
      integer("top_k", {}, "Experts per token.").at_least(1),
      number("routed_scaling_factor", {}, "Scale of routed outputs."),
      integer("num_expert_groups", {}, "Groups of experts.").at_least(1),
      integer("num_limited_groups", {}, "Groups that one token may use.").at_least(1),
      number("load_balance_coeff", {}, "Load balancing."),
      word("expert_w1", {}, "First weight."),
      word("expert_w2", {}, "Second weight."),
      word("expert_w3", {}, "Third weight."),
      word("num_experts_attr", {}, "Attribute with the number of experts."),
      word("top_k_attr", {}, "Attribute with top_k."),
      flag("has_shared_experts", {}, "Shared experts."),
      word("shared_experts_pattern", {}, "Their names."),
      word("shared_experts_gate_pattern", {}, "Names of their gates."),
  };
}

Key expert_parallel_section() {
  std::vector<Key> keys = {
      enabled(),
      integer("autoep_size", 1, "Ranks that share the experts.").at_least(1),
      integer("expert_tensor_parallel_size", 1, "Ranks that share one expert.").at_least(1),
      choice("preset_model", {}, {"mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"}, "Known model."),
      flag("use_grouped_mm", true, "Grouped matrix products."),
      flag("disable_triton_grouped_mm", false, "Not by Triton."),
      word("combine_impl", {}, "How outputs are combined."),
      flag("validate_folding_routing", false, "Check the routing."),
  };
  const std::vector<Key> router = router_keys();
  keys.insert(keys.end(), router.begin(), router.end());
  return section("expert_parallel", "Expert parallelism by DeepSpeed's AutoEP.", std::move(keys))
      .switched_by("enabled")
      .later();
}

}  // namespace

std::vector<Key> parallel_sections() {
  return {parallel_section(), pipeline_section(), tensor_parallel_section(), expert_parallel_section()};
}

}  // namespace deeptide::config
