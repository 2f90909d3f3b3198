// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's top level: batch sizes, gradients, reporting.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

const char* const kFromTheOthers = "what the other batch sizes and the world size give";
const char* const kSumOrder =
    "gradients are summed in fp32 in rank order (deeptide.reduction \"ordered\") and divided once, so nothing "
    "overflows";

std::vector<Key> batch_keys() {
  return {
      integer("train_batch_size", {}, "Samples of one optimizer step over all ranks: micro x accumulation x world.")
          .at_least(1)
          .derives(kFromTheOthers),
      integer("train_micro_batch_size_per_gpu", {}, "Samples of one forward and backward on one rank.")
          .at_least(1)
          .derives(kFromTheOthers),
      integer("gradient_accumulation_steps", {}, "Micro-batches before an optimizer step.")
          .at_least(1)
          .derives(kFromTheOthers),
      flag("managed_gradient_accumulation", true, "The engine counts micro-batches and decides when a step applies.")
          .later("the engine always counts micro-batches itself"),
  };
}

std::vector<Key> gradient_keys() {
  return {
      choice("communication_data_type", {}, {"fp32", "fp16", "bf16"}, "Data type in which gradients travel.")
          .not_yet({"fp16"})
          .derives("the compute type"),
      choice("seq_parallel_communication_data_type", "fp32", {"fp32", "fp16", "bf16"},
             "Data type of gradients inside sequence-parallel groups.")
          .later("sequence parallelism is not there"),
      choice("gradient_allreduce_op", "mean", {"mean", "sum"}, "How ranks' gradients are combined; sum: stages 0-2.")
          .ignoring_case(),
      flag("prescale_gradients", false, "Divide by the world size before the reduction.").never(kSumOrder),
      number("gradient_predivide_factor", 1.0, "Divide by this before the reduction.").never(kSumOrder),
      flag("sparse_gradients", false, "Exchange sparse embedding gradients as indices and values.").later(),
      flag("disable_allgather", false, "Unused in DeepSpeed too.").never("DeepSpeed does not read it either"),
      integer("allgather_size", 500'000'000, "Bucket of the boolean form of zero_optimization.")
          .at_least(0)
          .never("the bucket's size is zero_optimization.allgather_bucket_size"),
      number("gradient_clipping", 1.0, "Global norm to which gradients are clipped; 0: off.").at_least(0),
      flag("graph_harvesting", false, "Capture the optimizer step in a CUDA graph.").later(),
      flag("use_data_before_expert_parallelism", false, "Order of data and expert groups.")
          .later("expert parallelism is not there"),
      flag("zero_allow_untested_optimizer", false, "Let ZeRO run optimizers that DeepSpeed has not tested.")
          .either("every optimizer that can be chosen here is tested with every stage"),
      flag("zero_force_ds_cpu_optimizer", true, "With CPU offload, insist on DeepSpeed's own CPU Adam.")
          .either("the same optimizer runs on every device, so there is no other one to insist on"),
  };
}

std::vector<Key> report_keys() {
  return {
      integer("steps_per_print", {}, "A progress line every so many steps.").at_least(1).derives("no progress lines"),
      flag("wall_clock_breakdown", false, "Report the time of a step's parts.").later(),
      flag("memory_breakdown", false, "Report memory at a step's parts.").later(),
      flag("dump_state", false, "Print the configuration and the engine's state at the start."),
      choice("log_level", {}, {"debug", "info", "warning", "error", "critical"}, "DeepSpeed's own logger.")
          .later("set the environment variable DEEPTIDE_LOG_LEVEL"),
      flag("dataloader_drop_last", false, "Leave out a last batch that is not whole."),
      integer("vocabulary_size", {}, "Only checked: a multiple of 8 is faster.").at_least(1).derives("not checked"),
      integer("sequence_parallel_size", 1, "Ranks that share one sequence.").at_least(1).later(),
      integer("data_parallel_size", {}, "Ranks that take different samples.")
          .at_least(1)
          .later("it follows from the world's size")
          .off_at(JsonValue(int64_t{1}))
          .derives("the world size"),
      section("weight_quantization", "Quantisation of weights for inference.", {}).leaves_open().when_present().later(),
  };
}

}  // namespace

std::vector<Key> top_level_keys() {
  std::vector<Key> keys = batch_keys();
  for (auto part : {gradient_keys(), report_keys()}) keys.insert(keys.end(), part.begin(), part.end());
  return keys;
}

}  // namespace deeptide::config
