// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's data efficiency: data_efficiency, curriculum_learning, progressive_layer_drop.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key enabled() { return flag("enabled", false, "Use it."); }

Key difficulty(const char* name) { return integer(name, {}, "Bound of the difficulty.").at_least(0); }

Key schedule_type() {
  return choice("schedule_type", {}, {"fixed_linear", "fixed_root", "fixed_discrete", "custom"}, "How it grows.");
}

Key schedule_config() {
  return section("schedule_config", "The growth's numbers.",
                 {
                     integer("total_curriculum_step", {}, "Steps of the growth.").at_least(1),
                     integer("difficulty_step", {}, "Multiple of the difficulty.").at_least(1),
                     integer("root_degree", {}, "Degree of the root.").at_least(1),
                     list("difficulty", Kind::integer, {}, "Difficulties."),
                     list("max_step", Kind::integer, {}, "Steps at which they change."),
                 });
}

Key curriculum_section() {
  return section("curriculum_learning", "Samples by difficulty.",
                 {
                     enabled(),
                     word("data_cluster_path", {}, "Folder of the clusters."),
                     dictionary("curriculum_metrics", "Metrics by name.",
                                {
                                    word("index_to_sample_path", {}, "File."),
                                    word("index_to_metric_path", {}, "File."),
                                    choice("difficulty_type", {}, {"value", "percentile"}, "What difficulty means."),
                                    choice("clustering_type", {}, {"schedule_based", "single_cluster"}, "Clusters."),
                                    difficulty("min_difficulty"),
                                    difficulty("max_difficulty"),
                                    schedule_type(),
                                    schedule_config(),
                                }),
                 })
      .switched_by("enabled")
      .later();
}

Key dynamic_batching_section() {
  return section("dynamic_batching", "Batches of similar numbers of tokens.",
                 {
                     enabled(),
                     word("metrics_path", {}, "File of the lengths."),
                     choice("lr_scaling_method", "linear", {"linear", "sqrt", "none"}, "How the rate follows."),
                     integer("min_batch_size", 1, "Fewest samples.").at_least(1),
                     integer("max_batch_size", {}, "Most samples.").at_least(1),
                     choice("sequence_picking_order", "dataloader", {"dataloader", "random", "seqlen"}, "Order."),
                     integer("max_tokens", {}, "Most tokens.").at_least(1),
                     flag("verbose", false, "Print batches."),
                 })
      .switched_by("enabled")
      .later();
}

Key random_ltd_schedule() {
  return section("random_ltd_schedule", "How many tokens stay.",
                 {
                     integer("min_value", {}, "At first.").at_least(1),
                     integer("max_value", {}, "At last.").at_least(1),
                     choice("schedule_type", {}, {"fixed_linear"}, "How it grows."),
                     section("schedule_config", "The growth's numbers.",
                             {integer("require_steps", {}, "Steps of the growth.").at_least(1),
                              integer("seq_per_step", {}, "Tokens per step.").at_least(1)}),
                 });
}

Key random_ltd_section() {
  return section("random_ltd", "Layers that leave out tokens at random.",
                 {
                     enabled(),
                     integer("total_layer_num", {}, "Layers of the model.").at_least(1),
                     integer("random_ltd_layer_num", {}, "Layers that leave out.").at_least(1),
                     list("random_ltd_layer_id", Kind::integer, {}, "Which ones."),
                     word("model_mask_name", {}, "Name of the mask."),
                     choice("model_type", {}, {"decoder", "encoder"}, "Kind of model."),
                     choice("hidden_state_order", {}, {"batch_seq_dim", "seq_batch_dim"}, "Order of dimensions."),
                     random_ltd_schedule(),
                     integer("global_batch_size", {}, "Samples of a step.").at_least(1),
                     integer("micro_batch_size", {}, "Samples of a forward pass.").at_least(1),
                     section("layer_token_lr_schedule", "A rate by tokens.", {enabled()}).leaves_open(),
                 })
      .switched_by("enabled")
      .later();
}

}  // namespace

std::vector<Key> data_sections() {
  return {
      section("data_efficiency", "Sampling and routing of data.",
              {
                  enabled(),
                  integer("seed", 1234, "Seed."),
                  section("data_sampling", "Which samples.",
                          {
                              enabled(),
                              integer("num_epochs", 1000, "Epochs.").at_least(1),
                              integer("num_workers", 0, "Loader processes.").at_least(0),
                              flag("pin_memory", false, "Page-locked batches."),
                              curriculum_section(),
                              dynamic_batching_section(),
                          })
                      .switched_by("enabled"),
                  section("data_routing", "Which tokens.", {enabled(), random_ltd_section()}).switched_by("enabled"),
              })
          .switched_by("enabled")
          .later(),
      section("curriculum_learning", "Sequence lengths that grow.",
              {
                  enabled(),
                  choice("curriculum_type", "seqlen", {"seqlen"}, "What grows."),
                  difficulty("min_difficulty"),
                  difficulty("max_difficulty"),
                  schedule_type(),
                  schedule_config(),
              })
          .switched_by("enabled")
          .later(),
      section("progressive_layer_drop", "Layers left out at random.",
              {
                  enabled(),
                  number("theta", 1.0, "Share of layers kept at last.").between(0, 1),
                  number("gamma", 0.001, "Speed.").at_least(0),
              })
          .switched_by("enabled")
          .later(),
  };
}

}  // namespace deeptide::config
