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

namespace deeptide {

enum class DataType : uint8_t { fp32, fp16, bf16 };

/// The batch-size triple as written; any two suffice, or one. Units: samples.
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

enum class OptimizerKind : uint8_t { none, adam, sgd };

/// Hyper-parameters of one parameter group. Adam reads all but `momentum`, SGD all but Adam's.
struct Hyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled_decay = true;  // AdamW; false: L2 added to the gradient
  bool bias_correction = true;
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
};

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::none;  // none: the section is absent
  std::string type;                          // as written: "AdamW"
  Hyperparameters defaults;
};

/// `type` is empty if the section is absent; `params` holds numbers (bools as 0/1), `names` holds words.
struct SchedulerConfig {
  std::string type;
  std::map<std::string, double> params;
  std::map<std::string, std::string> names;
};

/// Sizes are in elements, as in DeepSpeed. For an absent optional the engine chooses a value and prints it.
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
  bool sizes_given = true;  // the text gives max_train_batch_size and micro_batch_sizes
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
  std::string reduce_thread = "auto";  // sum on a separate thread: "auto" | "on" | "off"
  bool shared_memory = true;           // ranks of one host share memory; false: they act as if on different hosts
  bool tune_allocator = true;          // keep large CPU tensors' pages instead of faulting them anew
  int64_t unit_size = 0;               // maximum elements per unit; 0: one repeated block
  uint64_t seed = 0;
};

/// A parsed ds_config.json. The constructor validates every key at every depth; `decisions` reports the value of each
/// "auto" and absent key, one line each. Errors: ConfigError (a std::invalid_argument; ValueError in Python) naming
/// file, line, key and the nearest known key.
class Config {
 public:
  Config();  // every key at its default
  static Config from_file(const std::string& path);
  /// `text`: JSON with comments and trailing commas; `origin`: its name in errors, e.g. a path or "<dict>".
  static Config from_text(std::string_view text, const std::string& origin = "<text>");

  /// With elasticity on: the elastic batch, its largest micro-batch that divides, and the resulting accumulation.
  /// Errors: ConfigError, in DeepSpeed's words, if the sizes do not multiply or the world is not an elastic one.
  BatchSizes batch_sizes(int64_t world_size) const;
  /// The data type of parameters and activations.
  DataType compute_dtype() const;

  BatchConfig batch;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  ZeroConfig zero;
  ElasticityConfig elasticity;
  RuntimeConfig runtime;
  bool fp16 = false;  // rejected by the parser until loss scaling exists
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

/// The published JSON Schema (draft 2020-12) of all that `Config` accepts, and docs/config.md: both from one table.
std::string config_json_schema();
std::string config_markdown();

}  // namespace deeptide
