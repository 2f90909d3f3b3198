// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's elasticity and autotuning.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key elasticity_section() {
  std::vector<JsonValue> micro_batches;
  for (int64_t size : {2, 4, 6}) micro_batches.emplace_back(size);
  return section(
             "elasticity", "One global batch that suits many numbers of ranks; it sets all three batch sizes.",
             {
                 flag("enabled", false, "Use it.").into(&ElasticityConfig::enabled),
                 integer("max_train_batch_size", 2000, "Largest global batch; to be given when enabled.")
                     .at_least(1)
                     .into(&ElasticityConfig::max_train_batch_size),
                 list("micro_batch_sizes", Kind::integer, micro_batches,
                      "Micro-batches to choose from; to be given when enabled.")
                     .at_least(1)
                     .into(&ElasticityConfig::micro_batch_sizes),
                 integer("min_gpus", 1, "Fewest ranks.").at_least(1).into(&ElasticityConfig::min_gpus),
                 integer("max_gpus", 10'000, "Most ranks.").at_least(1).into(&ElasticityConfig::max_gpus),
                 integer("min_time", 0, "Minutes before a change.")
                     .at_least(0)
                     .either("a lost or a returned host causes a restart, at any time"),
                 number("version", 0.2, "0.1: any number of ranks; 0.2: whole nodes.").into(&ElasticityConfig::version),
                 flag("prefer_larger_batch", true, "Of two batches that suit equally many worlds, take the larger.")
                     .alias("prefer_large_batch")
                     .into(&ElasticityConfig::prefer_larger_batch),
                 flag("ignore_non_elastic_batch_info", false, "Ignore the batch keys instead of reporting an error.")
                     .into(&ElasticityConfig::ignore_non_elastic_batch_info),
                 integer("num_gpus_per_node", 1, "Ranks per node.")
                     .at_least(1)
                     .into(&ElasticityConfig::num_gpus_per_node),
                 integer("model_parallel_size", 1, "Ranks that share a model.")
                     .at_least(1)
                     .into(&ElasticityConfig::model_parallel_size),
             })
      .switched_by("enabled");
}

Key model_info_section() {
  return section("model_info", "The model, if known.",
                 {
                     flag("profile", false, "Measure it."),
                     integer("num_params", {}, "Parameters.").at_least(1),
                     integer("hidden_size", {}, "Hidden size.").at_least(1),
                     integer("num_layers", {}, "Layers.").at_least(1),
                 });
}

Key autotuning_section() {
  return section("autotuning", "Search for the fastest configuration.",
                 {
                     flag("enabled", false, "Use it."),
                     flag("fast", true, "Only micro-batches."),
                     word("results_dir", "autotuning_results", "Folder of results."),
                     word("exps_dir", "autotuning_exps", "Folder of experiments."),
                     flag("overwrite", true, "Overwrite them."),
                     integer("start_profile_step", 3, "First measured step.").at_least(0),
                     integer("end_profile_step", 5, "Last measured step.").at_least(0),
                     choice("metric", "throughput", {"throughput", "latency", "flops"}, "What counts."),
                     word("metric_path", {}, "File of the metric."),
                     choice("tuner_type", "gridsearch", {"gridsearch", "random", "model_based"}, "How it searches."),
                     integer("tuner_early_stopping", 5, "Trials without gain.").at_least(1),
                     integer("tuner_num_trials", 50, "Trials.").at_least(1),
                     integer("num_tuning_micro_batch_sizes", 3, "Micro-batches tried.").at_least(1),
                     section("arg_mappings", "Arguments of the script by key.", {}).leaves_open(),
                     model_info_section(),
                     word("model_info_path", {}, "File of model_info."),
                     integer("mp_size", 1, "Ranks that share a model.").at_least(1),
                     integer("max_train_batch_size", {}, "Largest global batch.").at_least(1),
                     integer("min_train_batch_size", 1, "Smallest global batch.").at_least(1),
                     integer("max_train_micro_batch_size_per_gpu", 1024, "Largest micro-batch.").at_least(1),
                     integer("min_train_micro_batch_size_per_gpu", 1, "Smallest micro-batch.").at_least(1),
                 })
      .switched_by("enabled")
      .later();
}

}  // namespace

std::vector<Key> tuning_sections() { return {elasticity_section(), autotuning_section()}; }

}  // namespace deeptide::config
