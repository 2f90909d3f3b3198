// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A training configuration: DeepSpeed's ds_config.json, strictly parsed and resolved. Needs no torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deeptide/hyperparameters.h"

namespace deeptide {

enum class DataType : uint8_t { fp32, fp16, bf16 };

/// The batch-size triple as written; any two, or one, suffice. Units: samples.
struct BatchConfig {
  std::optional<int64_t> train_batch_size;
  std::optional<int64_t> micro_batch_size;
  std::optional<int64_t> gradient_accumulation_steps;
};

/// The triple resolved for a data-parallel world: train == micro * accumulation * world.
struct BatchSizes {
  int64_t train = 0;
  int64_t micro = 0;
  int64_t accumulation = 1;
};

struct OptimizerConfig {
  std::string type;          // as written: "AdamW"; empty: the section is absent
  Hyperparameters defaults;  // empty likewise
};

/// `type` is empty when the section is absent; `params` holds numbers (bools as 0/1), `names` holds words.
struct SchedulerConfig {
  std::string type;
  std::map<std::string, double> params;
  std::map<std::string, std::string> names;
};

/// Sizes are in elements, as in DeepSpeed. An absent optional means: the engine chooses and prints its choice.
struct ZeroConfig {
  int stage = 0;
  int64_t reduce_bucket_size = 500'000'000;
  int64_t allgather_bucket_size = 500'000'000;
  bool overlap_comm = true;
  int64_t prefetch_bucket_size = 50'000'000;
  int64_t param_persistence_threshold = 100'000;
  int64_t model_persistence_threshold = INT64_MAX;
  std::optional<int64_t> max_live_parameters;
  std::optional<int64_t> max_reuse_distance;
  bool gather_16bit_weights_on_model_save = false;
};

/// The "elasticity" section: one global batch that suits many world sizes.
struct ElasticityConfig {
  bool enabled = false;
  bool sizes_given = true;  // max_train_batch_size and micro_batch_sizes stand in the text, not only by default
  int64_t max_train_batch_size = 2000;
  std::vector<int64_t> micro_batch_sizes{2, 4, 6};
  int64_t min_gpus = 1;
  int64_t max_gpus = 10'000;
  int64_t num_gpus_per_node = 1;
  int64_t model_parallel_size = 1;
  double version = 0.2;  // 0.1: any number of ranks; 0.2: whole nodes
  bool prefer_larger_batch = true;
  bool ignore_non_elastic_batch_info = false;
};

/// Deeptide's own section, "deeptide": {…}.
struct RuntimeConfig {
  double comm_timeout_s = 1800.0;      // every wait on a peer
  bool ordered_reduction = true;       // "reduction": "ordered" | "transport"
  std::string reduce_thread = "auto";  // sums on a thread of its own: "auto" | "on" | "off"
  bool shared_memory = true;           // ranks of one host share memory; false: they talk as if apart
  bool tune_allocator = true;          // keep large CPU tensors' pages instead of faulting them anew
  int64_t unit_size = 0;               // elements of a unit at most; 0: one repeated block
  uint64_t seed = 0;
};

/// A parsed ds_config.json. Construction validates every key at every depth; `decisions` says what "auto" and
/// absent keys became, one line each. Errors: ValueError (c10::ValueError is not used here: std::invalid_argument
/// derived `ConfigError`) naming file, line, key and the nearest known key.
class Config {
 public:
  Config();  // every key at its default
  static Config from_file(const std::string& path);
  /// `text`: JSON with comments and trailing commas; `origin`: what errors call it, e.g. a path or "<dict>".
  static Config from_text(std::string_view text, const std::string& origin = "<text>");

  /// With elasticity on: the elastic batch, its largest micro-batch that divides, and the accumulation that follows.
  /// Errors: ConfigError when the sizes do not multiply, in DeepSpeed's words, or the world is not an elastic one.
  BatchSizes batch_sizes(int64_t world_size) const;
  /// The data type of parameters and activations.
  DataType compute_dtype() const;

  BatchConfig batch;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  ZeroConfig zero;
  ElasticityConfig elasticity;
  RuntimeConfig runtime;
  bool fp16 = false;  // rejected by the parser until loss scaling is there
  bool bf16 = false;
  std::optional<DataType> communication_dtype;          // absent: the compute type
  std::optional<DataType> gradient_accumulation_dtype;  // absent: fp32
  double gradient_clipping = 1.0;                       // 0: off
  bool gradient_mean = true;                            // gradient_allreduce_op; false: sum
  std::optional<int64_t> steps_per_print;
  bool dataloader_drop_last = false;
  bool dump_state = false;
  std::string origin;
  std::string text;  // as read, for checkpoints
  std::vector<std::string> decisions;
};

/// The published JSON Schema (draft 2020-12) of everything `Config` accepts, and docs/config.md, both from one table.
std::string config_json_schema();
std::string config_markdown();

}  // namespace deeptide
