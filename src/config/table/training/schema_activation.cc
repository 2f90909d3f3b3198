// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's activations and attention: activation_checkpointing, sparse_attention, aio.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

constexpr const char* kByConfigure = "python/deeptide/as_deepspeed/training/checkpointing.py";

Key activation_checkpointing_section() {
  return section(
      "activation_checkpointing",
      "What autograd keeps of a model's blocks between forward and backward, and options of DeepSpeed's "
      "checkpoint function.",
      {
          choice("policy", "none", {"none", "recompute", "host", "files"},
                 "\"recompute\": backward computes every block again. \"host\": what blocks keep goes to "
                 "the host's memory and comes back; for accelerators. \"files\": to files in nvme_path. \"auto\", "
                 "with memory: as few blocks are recomputed, or, with nvme_path, go to files as the first "
                 "step shows to be needed. Numbered blocks of Python models.")
              .auto_means("the fewest blocks to recompute or write to files so that memory holds; without memory, none")
              .read_by("python/deeptide/activations"),
          anything("memory",
                   "With policy \"auto\": the most that activations of one rank may take, a size such as "
                   "\"6GiB\" or a number of bytes.")
              .read_by("python/deeptide/activations"),
          list("nvme_path", Kind::word, {},
               "With policy \"files\" or \"auto\": folder of the files, or several, over which they are "
               "striped.")
              .or_one()
              .read_by("python/deeptide/activations"),
          integer("buffer_count", 8, "Blocks of 4 MiB in memory between a rank and its files.")
              .between(4, 1024)
              .read_by("python/deeptide/activations"),
          flag("partition_activations", false,
               "deepspeed.checkpointing.configure(deepspeed_config=…) makes its checkpoint function keep a part of "
               "its arguments on each of the ranks that share layers.")
              .read_by(kByConfigure),
          integer("number_checkpoints", {},
                  "Checkpointed calls whose arguments are kept at once, for contiguous memory.")
              .at_least(0)
              .read_by(kByConfigure),
          flag("contiguous_memory_optimization", false,
               "deepspeed.checkpointing.configure(deepspeed_config=…) makes its checkpoint function keep its "
               "arguments in buffers that are made once.")
              .read_by(kByConfigure),
          flag("synchronize_checkpoint_boundary", false,
               "It makes the function wait for the device at the begin and end of forward and backward.")
              .read_by(kByConfigure),
          flag("profile", false, "It makes the function log how long forward and backward took.").read_by(kByConfigure),
          flag("cpu_checkpointing", false,
               "deepspeed.checkpointing.configure(deepspeed_config=…) makes its checkpoint function keep "
               "activations in CPU memory.")
              .read_by(kByConfigure),
      });
}

Key sparse_attention_section() {
  const std::vector<JsonValue> four{JsonValue(int64_t{4})}, zero{JsonValue(int64_t{0})};
  return section(
      "sparse_attention",
      "Block-sparse attention. Models read it: deeptide.ops.sparse_attention, deeptide::ops::sparse_layout.",
      {
          choice<SparsityMode>("mode", SparsityMode::fixed,
                               {{"dense", SparsityMode::dense},
                                {"fixed", SparsityMode::fixed},
                                {"variable", SparsityMode::variable},
                                {"bigbird", SparsityMode::bigbird},
                                {"bslongformer", SparsityMode::bslongformer},
                                {"local_sliding_window", SparsityMode::local_sliding_window}},
                               "Layout.")
              .into(&SparsityConfig::mode),
          integer("block", 16, "Elements of a block's side.").at_least(1).into(&SparsityConfig::block),
          flag("different_layout_per_head", false, "One layout per head.")
              .into(&SparsityConfig::different_layout_per_head),
          integer("num_local_blocks", 4, "Blocks of the local window.")
              .at_least(1)
              .into(&SparsityConfig::num_local_blocks),
          integer("num_global_blocks", 1, "Global blocks.").at_least(0).into(&SparsityConfig::num_global_blocks),
          choice<AttentionDirection>("attention", AttentionDirection::bidirectional,
                                     {{"bidirectional", AttentionDirection::bidirectional},
                                      {"unidirectional", AttentionDirection::unidirectional}},
                                     "Direction.")
              .into(&SparsityConfig::attention),
          flag("horizontal_global_attention", false, "Global blocks attend to all.")
              .into(&SparsityConfig::horizontal_global_attention),
          integer("num_different_global_patterns", 1, "Patterns over the heads.")
              .at_least(1)
              .into(&SparsityConfig::num_different_global_patterns),
          integer("num_random_blocks", 0, "Random blocks.").at_least(0).into(&SparsityConfig::num_random_blocks),
          list("local_window_blocks", Kind::integer, four, "Windows.").into(&SparsityConfig::local_window_blocks),
          list("global_block_indices", Kind::integer, zero, "Global blocks by index.")
              .into(&SparsityConfig::global_block_indices),
          list("global_block_end_indices", Kind::integer, {}, "Their ends.")
              .into(&SparsityConfig::global_block_end_indices),
          integer("num_sliding_window_blocks", 3, "Blocks of the sliding window.")
              .at_least(1)
              .into(&SparsityConfig::num_sliding_window_blocks),
      });
}

Key aio_section() {
  return section("aio", "Input and output for offloading to NVMe.",
                 {
                     integer("block_size", 1'048'576, "Bytes of one request.").at_least(1),
                     integer("queue_depth", 8, "Requests in flight.").at_least(1),
                     integer("intra_op_parallelism", 1, "Threads per request.").at_least(1).alias("thread_count"),
                     flag("single_submit", false, "Submit requests one by one."),
                     flag("overlap_events", true, "Submit while waiting."),
                     flag("use_gds", false, "GPUDirect storage."),
                 })
      .never(
          "transfers are of 4 MiB; the buffer_count of offload_optimizer and offload_param says how many are under "
          "way");
}

}  // namespace

std::vector<Key> activation_sections() {
  return {activation_checkpointing_section(), sparse_attention_section(), aio_section()};
}

}  // namespace deeptide::config
