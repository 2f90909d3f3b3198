// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's data efficiency: data_efficiency, curriculum_learning, progressive_layer_drop.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key difficulty(const char* name, const char* doc) { return integer(name, {}, doc).at_least(0); }

Key schedule_type() {
  return choice("schedule_type", {}, {"fixed_linear", "fixed_root", "fixed_discrete", "custom"},
                "How the difficulty grows; custom: by a function of the step, which the program sets.");
}

std::vector<Key> schedule_bounds() {
  return {difficulty("min_difficulty",
                     "The difficulty of the first step; a schedule that grows by multiples of "
                     "difficulty_step begins at the first one that is not below."),
          difficulty("max_difficulty", "The difficulty at which the curriculum ends.")};
}

Key schedule_config() {
  return section(
      "schedule_config", "The growth's numbers.",
      {
          integer("total_curriculum_step", {}, "Optimizer steps from min_difficulty to max_difficulty.").at_least(1),
          integer("difficulty_step", {}, "Difficulties are multiples of it.").at_least(1),
          integer("root_degree", {}, "fixed_root: the degree; 1 is linear, 2 the square root.").at_least(1),
          list("difficulty", Kind::integer, {}, "fixed_discrete: the difficulties, one more than max_step."),
          list("max_step", Kind::integer, {}, "fixed_discrete: the last step of each but the last."),
      });
}

Key curriculum_section() {
  std::vector<Key> metric = {
      word("index_to_sample_path", {},
           "Index files, without their suffix, that the DataAnalyzer wrote: samples by row."),
      word("index_to_metric_path", {}, "Likewise: the metric's value of each row."),
      choice("difficulty_type", {}, {"value", "percentile"}, "Whether a difficulty is a value of the metric."),
      choice("clustering_type", {}, {"schedule_based", "single_cluster"},
             "schedule_based: samples join as the difficulty reaches them; single_cluster: all from the start."),
      schedule_type(),
      schedule_config(),
  };
  for (Key& bound : schedule_bounds()) metric.push_back(std::move(bound));
  return section("curriculum_learning", "Samples in the order of their difficulty.",
                 {
                     enabled(),
                     word("data_cluster_path", {}, "DeepSpeed's folder of clusters.")
                         .never("clusters stay in memory; a checkpoint says how they came about"),
                     dictionary("curriculum_metrics", "Metrics by name.", std::move(metric)),
                 })
      .switched_by("enabled");
}

Key dynamic_batching_section() {
  return section(
             "dynamic_batching",
             "Batches of similar numbers of tokens, and rates that follow their sizes; used by "
             "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed.",
             {
                 enabled(),
                 word("metrics_path", {}, "Folder in which the DataAnalyzer wrote the metric \"seqlen\"."),
                 choice("lr_scaling_method", "linear", {"linear", "sqrt", "none"}, "How the rate follows a batch."),
                 integer("min_batch_size", 1, "Fewest samples of a micro-batch.").at_least(1),
                 integer("max_batch_size", {}, "Most samples of a micro-batch.").at_least(1),
                 choice("sequence_picking_order", "dataloader", {"dataloader", "random", "seqlen"},
                        "Order in which samples join; seqlen: shortest first."),
                 integer("max_tokens", {}, "Most tokens of a micro-batch; longer samples are left out.").at_least(1),
                 flag("verbose", false, "Print each batch."),
             })
      .switched_by("enabled");
}

Key random_ltd_schedule() {
  return section("random_ltd_schedule", "How many tokens stay.",
                 {
                     integer("min_value", {}, "Tokens at first.").at_least(1),
                     integer("max_value", {}, "Tokens at last: the sequence's length.").at_least(1),
                     choice("schedule_type", {}, {"fixed_linear"}, "How their number grows."),
                     section("schedule_config", "The growth's numbers.",
                             {integer("require_steps", {}, "Optimizer steps of the growth.").at_least(1),
                              integer("seq_per_step", {}, "Numbers of tokens are multiples of it.").at_least(1)}),
                 });
}

Key random_ltd_section() {
  const char* const of_batch_sizes = "follows from the batch sizes";
  return section("random_ltd",
                 "Layers that see a random part of the tokens; convert_to_random_ltd chooses their class.",
                 {
                     enabled(),
                     integer("total_layer_num", {}, "Layers of the model, for the count of tokens.").at_least(1),
                     integer("random_ltd_layer_num", {}, "Layers that leave out tokens.").at_least(1),
                     list("random_ltd_layer_id", Kind::integer, {}, "Their numbers, which are part of their names."),
                     word("model_mask_name", {}, "The layers' argument that holds the attention mask."),
                     choice("model_type", {}, {"decoder", "encoder"}, "Whether a mask is cut, or its rows are chosen."),
                     choice("hidden_state_order", {}, {"batch_seq_dim", "seq_batch_dim"}, "Order of dimensions."),
                     random_ltd_schedule(),
                     integer("global_batch_size", {}, "Samples of a step.").at_least(1).never(of_batch_sizes),
                     integer("micro_batch_size", {}, "Samples of a forward pass.").at_least(1).never(of_batch_sizes),
                     section("layer_token_lr_schedule", "A rate by tokens.", {enabled()})
                         .leaves_open()
                         .switched_by("enabled")
                         .later("DeepSpeed refuses it as well"),
                 })
      .switched_by("enabled");
}

}  // namespace

std::vector<Key> data_sections() {
  std::vector<Key> legacy = {
      enabled(),
      choice("curriculum_type", "seqlen", {"seqlen"},
             "The difficulty is a sequence length, which forward gets as `curriculum_seqlen`."),
      schedule_type(),
      schedule_config(),
  };
  for (Key& bound : schedule_bounds()) legacy.push_back(std::move(bound));
  std::vector<Key> sections = {
      section(
          "data_efficiency", "Sampling and routing of data.",
          {
              enabled(),
              integer("seed", 1234, "Of samplers and orders."),
              section("data_sampling", "Which samples.",
                      {
                          enabled(),
                          integer("num_epochs", 1000, "A curriculum ends after so many times the data.").at_least(1),
                          integer("num_workers", 0, "Processes of a loader.").at_least(0),
                          flag("pin_memory", false, "Page-locked batches."),
                          curriculum_section(),
                          dynamic_batching_section(),
                      }),
              section("data_routing", "Which tokens.",
                      {
                          enabled(),
                          integer("seed", 1234, "Of the choice of tokens.")
                              .never("torch's generator chooses them, and a checkpoint keeps its state"),
                          random_ltd_section(),
                      }),
          }),
      section("curriculum_learning", "Sequence lengths that grow; DeepSpeed's older form.", std::move(legacy))
          .switched_by("enabled"),
      section("progressive_layer_drop",
              "Layers left out at random: forward gets `progressive_layer_drop` and `pld_theta`.",
              {
                  enabled(),
                  number("theta", 1.0, "The share of layers kept at last.").between(0, 1),
                  number("gamma", 0.001, "The speed at which the share falls, per step.").at_least(0),
              })
          .switched_by("enabled"),
  };
  for (Key& one : sections) one = std::move(one).read_by("data/curriculum.cc and python/deeptide/_engine/less_work.py");
  return sections;
}

}  // namespace deeptide::config
