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
                 enabled().into(&ElasticityConfig::enabled),
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

constexpr const char* kFirstRunTells = "the script's first run tells it";

Key model_info_section() {
  return section("model_info", "The model, if known.",
                 {
                     flag("profile", false, "Measure it.").never(kFirstRunTells),
                     integer("num_params", {}, "Parameters.").at_least(1).never(kFirstRunTells),
                     integer("hidden_size", {}, "Hidden size.").at_least(1).never(kFirstRunTells),
                     integer("num_layers", {}, "Layers.").at_least(1).never(kFirstRunTells),
                 });
}

std::vector<Key> search_keys() {
  return {
      flag("enabled", false, "Search.").either("deeptide tune, or --autotuning of the launcher, searches"),
      flag("fast", true, "Only stages, placements and micro-batches; false: the sizes of buckets, too."),
      word("results_dir", "autotuning_results", "Folder for the table and the fastest configuration."),
      word("exps_dir", "autotuning_exps", "Folder for the runs; what it holds is not measured again."),
      flag("overwrite", false, "Measure again (DeepSpeed: true)."),
      integer("start_profile_step", 3, "First measured step.").at_least(0),
      integer("end_profile_step", 5, "Last measured step.").at_least(0),
      choice("metric", "throughput", {"throughput", "latency", "flops"},
             "What counts: samples per second, seconds per step, or operations per second, which samples tell."),
      word("metric_path", {}, "File of the metric.").never("each run's folder in exps_dir holds its result.json"),
      choice("tuner_type", "gridsearch", {"gridsearch", "random", "model_based"}, "How it searches.")
          .either("the plan and what was measured lead the search"),
      integer("tuner_early_stopping", 5, "Runs without gain after which the search ends.").at_least(1),
      integer("tuner_num_trials", 50, "Most runs.").at_least(1),
  };
}

std::vector<Key> bound_keys() {
  return {
      integer("num_tuning_micro_batch_sizes", 3, "Most micro-batches tried in each direction.").at_least(1),
      section("arg_mappings",
              "The script's own arguments by key, such as {\"train_micro_batch_size_per_gpu\": \"--batch\"}.", {})
          .leaves_open(),
      model_info_section(),
      word("model_info_path", {}, "File of model_info.").never(kFirstRunTells),
      integer("mp_size", 1, "Ranks that share a model.").at_least(1).never("each rank has data of its own"),
      integer("max_train_batch_size", {}, "Largest global batch; absent: the global batch stays as it is.").at_least(1),
      integer("min_train_batch_size", 1, "Smallest global batch, with max_train_batch_size.").at_least(1),
      integer("max_train_micro_batch_size_per_gpu", 1024, "Largest micro-batch.").at_least(1),
      integer("min_train_micro_batch_size_per_gpu", 1, "Smallest micro-batch.").at_least(1),
  };
}

Key autotuning_section() {
  std::vector<Key> keys = search_keys();
  for (Key& key : bound_keys()) keys.push_back(std::move(key));
  return section("autotuning", "Bounds and folders of `deeptide tune`, the search for the fastest configuration.",
                 std::move(keys))
      .switched_by("enabled")
      .read_by("python/deeptide/_tuning/command.py");
}

}  // namespace

std::vector<Key> tuning_sections() { return {elasticity_section(), autotuning_section()}; }

}  // namespace deeptide::config
