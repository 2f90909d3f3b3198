// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's "zero_optimization" section.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

const char* const kFlatGather = "a gather is always one collective over a unit's flat buffer";
const char* const kNoHooks = "parameters are gathered as operators need them, in an order all ranks agree on";

std::vector<Key> gradient_keys() {
  return {
      integer("stage", 0, "What is sharded. 0: nothing, 1: optimizer states, 2: gradients too, 3: parameters too.")
          .between(0, 3)
          .into(&ZeroConfig::stage),
      flag("contiguous_gradients", true, "Copy gradients into one contiguous buffer.")
          .never("gradients always live in contiguous flat buffers"),
      flag("reduce_scatter", true, "Reduce-scatter gradients instead of all-reducing them.")
          .never("gradients are reduced by the same reduce-scatter at every stage, so that all give the same numbers"),
      integer("reduce_bucket_size", 500'000'000, "Elements of gradients reduced at once.")
          .at_least(0)
          .into(&ZeroConfig::reduce_bucket_size),
      flag("use_multi_rank_bucket_allreduce", true, "One all-reduce for a bucket of several owners.")
          .never("a bucket is always reduced to all its owners by one reduce-scatter"),
      flag("round_robin_gradients", false, "Assign parameters to ranks in turn.")
          .never("every parameter's buffer is cut evenly over all ranks already"),
      flag("ignore_unused_parameters", true, "false: a parameter without a gradient is an error.").later(),
      flag("legacy_stage1", false, "The first implementation of stage 1.")
          .never("there is one implementation of all stages"),
      flag("grad_hooks", true, "Listed in DeepSpeed's documentation only.").never("DeepSpeed does not read it either"),
      flag("overlap_comm", true, "Communicate while computing (DeepSpeed's default: only at stage 3).")
          .or_null()
          .into(&ZeroConfig::overlap_comm),
      flag("compute_grad_norm", true, "Compute the gradients' norm though nothing clips by it.")
          .either("the pass that checks for NaN and Inf computes it on the way"),
      flag("parameter_alignment", false, "Begin each parameter at a 16-byte boundary.")
          .either("each begins at a 64-byte boundary"),
  };
}

std::vector<Key> gather_keys() {
  return {
      flag("allgather_partitions", true, "All-gather updated parameters instead of broadcasting them.")
          .never(kFlatGather),
      integer("allgather_bucket_size", 500'000'000, "Elements of updated parameters gathered at once.")
          .at_least(0)
          .into(&ZeroConfig::allgather_bucket_size),
      integer("sub_group_size", 1'000'000'000, "Elements that stage 3's optimizer updates at once.")
          .at_least(0)
          .never("the update runs in place over each unit's flat shard and needs no buffer of its own"),
      integer("stage3_prefetch_bucket_size", 50'000'000, "Elements gathered ahead of their use.")
          .at_least(0)
          .alias("prefetch_bucket_size")
          .into(&ZeroConfig::prefetch_bucket_size),
      integer("stage3_param_persistence_threshold", 100'000, "Parameters of at most this many elements stay whole.")
          .at_least(0)
          .alias("param_persistence_threshold")
          .into(&ZeroConfig::param_persistence_threshold),
      integer("stage3_model_persistence_threshold", INT64_MAX, "Most elements that stay whole, over all parameters.")
          .at_least(0)
          .alias("model_persistence_threshold")
          .into(&ZeroConfig::model_persistence_threshold),
      integer("stage3_max_live_parameters", {}, "Most elements gathered at a time (DeepSpeed: 1e9).")
          .at_least(0)
          .alias("max_live_parameters")
          .derives("chosen by the engine")
          .into(&ZeroConfig::max_live_parameters),
      integer("stage3_max_reuse_distance", {},
              "Keep parameters that are used again within this many elements (DeepSpeed: 1e9).")
          .at_least(0)
          .alias("max_reuse_distance")
          .derives("chosen by the engine")
          .into(&ZeroConfig::max_reuse_distance),
      flag("stage3_gather_16bit_weights_on_model_save", true,
           "save_16bit_model gathers the parameters (DeepSpeed: false).")
          .alias("gather_16bit_weights_on_model_save")
          .alias("stage3_gather_fp16_weights_on_model_save")
          .into(&ZeroConfig::gather_16bit_weights_on_model_save),
      integer("stage3_module_granularity_threshold", 0, "Gather modules of finer granularity as a whole.")
          .at_least(0)
          .alias("module_granularity_threshold")
          .never("parameters are gathered by units of whole blocks; deeptide.unit_size sets their size"),
      flag("stage3_use_all_reduce_for_fetch_params", false, "Fetch by an all-reduce of zero-filled buffers.")
          .alias("use_all_reduce_for_fetch_params")
          .never(kFlatGather),
      flag("stage3_allgather_sequential", false, "One all-gather per parameter.")
          .alias("allgather_sequential")
          .never(kFlatGather),
  };
}

std::vector<Key> model_keys() {
  return {
      flag("memory_efficient_linear", true, "Replace F.linear by a version that keeps no gathered weight.")
          .either("what backward saves shares the parameter's storage, which is released in any case"),
      flag("override_module_apply", true, "Gather parameters inside Module.apply.")
          .either("Module.apply sees whole parameters in any case, and is not replaced"),
      section("leaf_module", "Modules whose children are gathered together.",
              {
                  list("classes", Kind::word,
                       words({"transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
                              "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
                              "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"}),
                       "By class.")
                      .never(kNoHooks),
                  list("names", Kind::word, words({}), "By name.").never(kNoHooks),
                  list("name_suffixes", Kind::word, words({}), "By the end of the name.").never(kNoHooks),
              }),
      flag("log_trace_cache_warnings", false, "Warn when the order of modules changes.")
          .never("a changed order of modules is no fault here: the plan follows it"),
      flag("enable_sanity_checks", false, "Check stage 3's buckets.")
          .never("what ranks must hold alike is compared at every boundary in any case"),
  };
}

std::vector<Key> checkpoint_keys() {
  return {
      flag("load_from_fp32_weights", true, "Restore masters from the checkpoint's fp32 values.").later(),
      flag("elastic_checkpoint", false, "Save states without padding, for another number of ranks.")
          .either("checkpoints always hold whole tensors by name, without padding"),
      flag("pipeline_loading_checkpoint", false, "Ranks load one after another, which bounds the host's memory.")
          .never("a rank reads its own slices only"),
      flag("save_muon_momentum_buffer_in_memory", false, "Keep Muon's momentum in memory.")
          .later("it lies where offload_optimizer puts all states"),
  };
}

std::vector<Key> offload_keys() {
  constexpr const char* kTranslator = "config::translate";
  return {
      offload_param_section(),
      offload_optimizer_section(),
      zenflow_section(),
      flag("cpu_offload", {}, "Deprecated; true: offload_optimizer {\"device\": \"cpu\"}.").read_by(kTranslator),
      flag("cpu_offload_param", {}, "Deprecated; true: offload_param {\"device\": \"cpu\"}.").read_by(kTranslator),
      flag("cpu_offload_use_pin_memory", {}, "Deprecated: pin_memory of both.")
          .off_at(JsonValue(false))
          .never("as pin_memory: memory that a device reads is page-locked in any case"),
  };
}

std::vector<Key> plus_plus_keys() {
  return {
      integer("zero_hpz_partition_size", 1, "ZeRO++: ranks that keep a second shard among them.").at_least(1).later(),
      flag("zero_quantized_weights", false, "ZeRO++: gather in int8.").later(),
      flag("zero_quantized_nontrainable_weights", false, "ZeRO++: gather frozen weights in int8.").later(),
      flag("zero_quantized_gradients", false,
           "ZeRO++: gradients travel in int4, or as deeptide.quantized_gradients says.")
          .into(&ZeroConfig::quantized_gradients),
      section("zeropp_loco_param", "ZeRO++: error feedback.",
              {
                  number("err_beta", 0.8, "Decay rate of the error.").between(0, 1),
                  integer("reset_T", 1024, "Steps before the error is reset.").at_least(1),
              })
          .when_present()
          .later(),
      integer("mics_shard_size", -1, "MiCS: ranks over which parameters are sharded.").at_least(-1).later(),
      flag("mics_hierarchical_params_gather", false, "MiCS: gather between nodes, then inside.").later(),
  };
}

}  // namespace

std::vector<Key> zero_sections() {
  std::vector<Key> keys;
  for (auto part :
       {gradient_keys(), gather_keys(), model_keys(), checkpoint_keys(), offload_keys(), plus_plus_keys()}) {
    keys.insert(keys.end(), part.begin(), part.end());
  }
  return {section("zero_optimization", "Sharding; true stands for stage 1.", std::move(keys)).alias("zero").or_flag()};
}

}  // namespace deeptide::config
