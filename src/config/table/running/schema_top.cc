// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's top level: batch sizes, gradients, reporting.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

const char* const kFromTheOthers = "what follows from the other batch sizes and the world size";
const char* const kSumOrder =
    "gradients are summed in fp32, in one order (deeptide.reduction \"ordered\") and divided once, so nothing "
    "overflows";

std::vector<Key> batch_keys() {
  return {
      integer("train_batch_size", {}, "Samples of one optimizer step over all ranks: micro x accumulation x world.")
          .at_least(1)
          .derives(kFromTheOthers)
          .into(&BatchConfig::train_batch_size),
      integer("train_micro_batch_size_per_gpu", {}, "Samples of one forward and backward on one rank.")
          .at_least(1)
          .derives(kFromTheOthers)
          .into(&BatchConfig::micro_batch_size),
      integer("gradient_accumulation_steps", {}, "Micro-batches before an optimizer step.")
          .at_least(1)
          .derives(kFromTheOthers)
          .into(&BatchConfig::gradient_accumulation_steps),
      flag("managed_gradient_accumulation", true, "The engine counts micro-batches and decides when a step applies.")
          .later("the engine always counts micro-batches itself"),
  };
}

std::vector<Key> reduction_keys() {
  return {
      choice<DataType>("communication_data_type", {}, data_types(), "Data type in which ranks exchange gradients.")
          .ignoring_case()
          .derives("the compute type")
          .into(&PrecisionConfig::communication_dtype),
      choice("seq_parallel_communication_data_type", "fp32", {"fp32", "fp16", "bf16"},
             "Data type of gradients inside sequence-parallel groups.")
          .never("there are no sequence-parallel groups; sequence_parallel_size is an error"),
      choice<GradientOp>("gradient_allreduce_op", GradientOp::mean,
                         {{"mean", GradientOp::mean}, {"sum", GradientOp::sum}},
                         "How ranks' gradients are combined; sum: stages 0-2.")
          .ignoring_case()
          .into(&GradientConfig::op),
      flag("prescale_gradients", false, "Divide by the world size before the reduction.").never(kSumOrder),
      number("gradient_predivide_factor", 1.0, "Divide by this before the reduction.").never(kSumOrder),
      flag("sparse_gradients", false,
           "Between hosts, gradients of embeddings travel as the rows that are not zero, where that takes fewer bytes.")
          .into(&GradientConfig::sparse),
      flag("disable_allgather", false, "Unused in DeepSpeed too.").never("DeepSpeed does not use it either"),
      integer("allgather_size", 500'000'000, "Bucket of the boolean form of zero_optimization.")
          .at_least(0)
          .never("the bucket's size is zero_optimization.allgather_bucket_size"),
      number("gradient_clipping", 1.0, "Global norm to which gradients are clipped; 0: off.")
          .at_least(0)
          .into(&GradientConfig::clipping),
      flag("graph_harvesting", false, "Capture the optimizer step in a CUDA graph.")
          .never("a step is one kernel per run of parameters, which leaves a graph nothing to gain"),
      flag("use_data_before_expert_parallelism", false, "Order of data and expert groups.")
          .never("there are no expert groups; expert_parallel is an error"),
      flag("zero_allow_untested_optimizer", false,
           "Let an optimizer of the program's own step shards though a trial showed that it looks beyond elements.")
          .into(&ZeroConfig::allow_untested_optimizer),
      flag("zero_force_ds_cpu_optimizer", true, "With CPU offload, insist on DeepSpeed's own CPU Adam.")
          .either("the same optimizer runs on every device"),
  };
}

std::vector<Key> report_keys() {
  return {
      integer("steps_per_print", {}, "Steps between progress lines.")
          .at_least(1)
          .derives("no progress lines")
          .into(&ReportConfig::steps_per_print),
      flag("wall_clock_breakdown", false,
           "Report where a step's time went and what limits it, every `steps_per_print` steps, else every step.")
          .into(&ReportConfig::wall_clock_breakdown),
      flag("memory_breakdown", false, "Report the engine's memory by role, likewise.")
          .into(&ReportConfig::memory_breakdown),
      flag("dump_state", false, "Print the configuration and the engine's state at the start.")
          .into(&ReportConfig::dump_state),
      choice("log_level", {}, {"debug", "info", "warning", "error", "critical"}, "DeepSpeed's own logger.")
          .never("the environment variable DEEPTIDE_LOG_LEVEL sets the level"),
      integer("cuda_visible_devices", {}, "The device to use; unused in DeepSpeed too.")
          .never("the launcher and the environment variable CUDA_VISIBLE_DEVICES choose devices"),
      flag("disable_python_gc", false, "Switch Python's garbage collector off.")
          .never("the engine keeps no cycles of objects that it would have to find; gc.disable() switches it off"),
      flag("dataloader_drop_last", false,
           "Leave out an incomplete last batch; else it is short on one rank, and on several filled up with samples of "
           "the epoch's beginning.")
          .into(&DataConfig::drop_last),
      integer("vocabulary_size", {}, "Only checked: a multiple of 8 is faster.")
          .at_least(1)
          .derives("not checked")
          .read_by("rules.cc, which warns about it"),
      integer("sequence_parallel_size", 1, "Ranks that share one sequence.").at_least(1).later(),
      integer("data_parallel_size", {}, "Only checked: ranks that take different samples, which follow from the mesh.")
          .at_least(1)
          .derives("not checked")
          .into(&BatchConfig::data_parallel_size),
      section("weight_quantization", "Quantisation of weights for inference.", {}).leaves_open().when_present().later(),
  };
}

}  // namespace

std::vector<Key> top_level_keys() {
  std::vector<Key> keys = batch_keys();
  for (auto part : {reduction_keys(), report_keys()}) keys.insert(keys.end(), part.begin(), part.end());
  return keys;
}

}  // namespace deeptide::config
