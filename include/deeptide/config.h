// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A training configuration: DeepSpeed's ds_config.json, strictly parsed, resolved and read-only. Needs no torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "deeptide/export.h"
#include "deeptide/hyperparameters.h"

namespace deeptide {

// The table in src/config/table fills the fields of the sections below: their defaults, ranges and spellings stand
// there and in docs/config.md, which is generated from it. An absent optional means that the engine decides and reports
// its decision.

enum class DataType : uint8_t { fp32, fp16, bf16 };

/// The batch sizes as given; any two of them, or one of the first two, determine the others. Units: samples.
struct BatchConfig {
  std::optional<int64_t> train_batch_size;
  std::optional<int64_t> micro_batch_size;
  std::optional<int64_t> gradient_accumulation_steps;
  std::optional<int64_t> data_parallel_size;  // ranks; determines nothing: the mesh has to have as many
};

/// The batch sizes for one data-parallel world: train == micro * accumulation * world.
struct BatchSizes {
  int64_t train = 0;
  int64_t micro = 0;
  int64_t accumulation = 1;
};

struct OptimizerConfig {
  std::string type;          // as written: "AdamW"; empty: the section is absent
  Hyperparameters defaults;  // empty likewise
  Hyperparameters rest;      // Muon's, of parameters that are no matrices; empty for other types
};

/// Parameters of the schedule "LRRangeTest".
struct LRRangeTestConfig {
  static constexpr std::string_view kType = "LRRangeTest";
  double min_lr = 0.0;
  int64_t step_size = 0;
  double step_rate = 0.0;
  bool staircase = false;
};

/// Parameters of the schedule "OneCycle".
struct OneCycleConfig {
  static constexpr std::string_view kType = "OneCycle";
  double min_lr = 0.0;
  double max_lr = 0.0;
  double decay_lr_rate = 0.0;
  int64_t first_step_size = 0;
  int64_t second_step_size = 0;
  int64_t first_stair_count = 0;   // 0: no stairs
  int64_t second_stair_count = 0;  // 0: no stairs
  int64_t decay_step_size = 0;     // 0: no decay
  bool cycle_momentum = false;
  double min_momentum = 0.0;
  double max_momentum = 0.0;
  double decay_momentum_rate = 0.0;
};

enum class WarmupShape : uint8_t { log, linear };

/// Parameters of the schedule "WarmupLR"; without `max_lr` each parameter group rises to its own lr.
struct WarmupLRConfig {
  static constexpr std::string_view kType = "WarmupLR";
  double min_lr = 0.0;
  std::optional<double> max_lr;
  int64_t num_steps = 0;
  WarmupShape shape = WarmupShape::log;
};

/// Parameters of the schedule "WarmupDecayLR".
struct WarmupDecayLRConfig {
  static constexpr std::string_view kType = "WarmupDecayLR";
  int64_t total_steps = 0;
  double min_lr = 0.0;
  double max_lr = 0.0;
  int64_t num_steps = 0;  // of the warm-up
  WarmupShape shape = WarmupShape::log;
};

/// Parameters of the schedule "WarmupCosineLR"; ratios are fractions of each parameter group's own lr.
struct WarmupCosineLRConfig {
  static constexpr std::string_view kType = "WarmupCosineLR";
  int64_t total_steps = 0;
  int64_t num_steps = 0;  // of the warm-up
  WarmupShape shape = WarmupShape::log;
  double min_ratio = 0.0;
  double cos_min_ratio = 0.0;
};

/// The learning-rate schedule; std::monostate when the section is absent.
using SchedulerConfig = std::variant<std::monostate, LRRangeTestConfig, OneCycleConfig, WarmupLRConfig,
                                     WarmupDecayLRConfig, WarmupCosineLRConfig>;

/// The schedule's "type", or an empty string without a schedule.
DEEPTIDE_API std::string_view scheduler_type(const SchedulerConfig& scheduler);

/// The section "zero_optimization". Sizes are in elements, as in DeepSpeed.
struct ZeroConfig {
  int stage = 0;
  int64_t reduce_bucket_size = 0;
  int64_t allgather_bucket_size = 0;
  bool overlap_comm = false;
  int64_t prefetch_bucket_size = 0;
  int64_t param_persistence_threshold = 0;
  int64_t model_persistence_threshold = 0;
  std::optional<int64_t> max_live_parameters;
  std::optional<int64_t> max_reuse_distance;
  bool gather_16bit_weights_on_model_save = true;
  bool allow_untested_optimizer = false;
  bool quantized_gradients = false;  // "zero_quantized_gradients"; RuntimeConfig has its width
};

enum class OffloadDevice : uint8_t { none, cpu, nvme };

/// The section "zero_optimization.offload_optimizer".
struct OffloadOptimizerConfig {
  OffloadDevice device = OffloadDevice::none;
  std::vector<std::string> folders;  // "nvme_path"
  int64_t buffer_count = 0;          // blocks of 4 MiB in memory for each kind of state
  double ratio = 0.0;                // share of the states that is offloaded
  bool measures_ratio = false;       // "auto": instead, what a step hides, measured at the start
};

/// The section "zero_optimization.offload_param".
struct OffloadParamConfig {
  OffloadDevice device = OffloadDevice::none;
  std::vector<std::string> folders;   // "nvme_path"
  int64_t buffer_count = 0;           // shards in memory at a time
  int64_t buffer_size = 0;            // elements of one of them, at most
  std::optional<int64_t> max_in_cpu;  // elements per rank that stay in memory
};

/// How much of one kind of state lies in memory, per rank; the rest lies in files.
struct DEEPTIDE_API MemoryShare {
  double fraction = 1.0;  // of all its bytes
  int64_t bytes = 0;      // more than that; negative: less

  bool is_all() const { return fraction >= 1.0 && bytes >= 0; }
  /// Returns how many of `total` bytes lie in memory.
  DEEPTIDE_API int64_t of(int64_t total) const;
};

/// The section "deeptide.placement".
struct PlacementConfig {
  std::vector<std::string> folders;             // "nvme_path"
  std::optional<MemoryShare> optimizer_states;  // absent: as offload_optimizer says
  std::optional<MemoryShare> parameters;        // absent: as offload_param says
  std::optional<MemoryShare> gradients;         // absent: in memory
  // The part that an accelerator holds; absent where the above are, and where it holds all. A CPU's is in memory.
  std::optional<MemoryShare> optimizer_states_on_device, parameters_on_device, gradients_on_device;
};

/// The section "elasticity": one global batch that suits many world sizes.
struct ElasticityConfig {
  bool enabled = false;
  bool sizes_given = false;  // whether the text gives both max_train_batch_size and micro_batch_sizes
  int64_t max_train_batch_size = 0;
  std::vector<int64_t> micro_batch_sizes;
  int64_t min_gpus = 0;
  int64_t max_gpus = 0;
  int64_t num_gpus_per_node = 0;
  int64_t model_parallel_size = 0;
  double version = 0.0;  // 0.1: any number of ranks; 0.2: whole nodes
  bool prefer_larger_batch = false;
  bool ignore_non_elastic_batch_info = false;
};

/// The batch that such a section gives.
struct ElasticBatch {
  int64_t train = 0;
  std::vector<int64_t> valid_worlds;  // ascending; numbers of data-parallel ranks
  int64_t micro = 0;                  // the largest that divides the batch per rank; 0 without a world
  int64_t preferred_micro = 0;        // version 0.2: the first that divides, or the largest if preferred
};

struct PrecisionConfig {
  bool fp16 = false;
  bool bf16 = false;
  bool auto_cast = false;   // cast floating inputs of the model to fp16
  double loss_scale = 0.0;  // 0: dynamic
  int64_t initial_scale_power = 16;
  int64_t loss_scale_window = 1000;  // steps
  int64_t hysteresis = 2;            // overflows
  bool consecutive_hysteresis = false;
  int64_t min_loss_scale = 1;
  bool autocast = false;  // around the forward pass
  DataType autocast_dtype = DataType::bf16;

  /// Whether gradients are fp16, and losses therefore scaled.
  bool scales_loss() const { return fp16 || (autocast && autocast_dtype == DataType::fp16); }
  std::optional<DataType> communication_dtype;           // absent: the compute type
  std::optional<DataType> gradient_accumulation_dtype;   // absent: fp32, or the type of rounded masters
  std::optional<DataType> buffer_dtype;                  // under fp16 and bf16; absent: buffers keep their own
  std::optional<std::vector<std::string>> keep_in_fp32;  // patterns of buffers' names; absent: the model's classes'
  bool fp16_masters = false;                             // under fp16: the parameters are their own masters
  bool bf16_masters = false;                             // under bf16, likewise
  bool bf16_moments = false;                             // under bf16: optimizer states in bf16

  /// Whether masters have the compute type, of 16 bits.
  bool rounds_masters() const { return (fp16 && fp16_masters) || (bf16 && bf16_masters); }
  bool rounds_moments() const { return bf16 && bf16_moments; }
};

enum class GradientOp : uint8_t { mean, sum };

struct GradientConfig {
  double clipping = 0.0;  // global norm; 0: off
  GradientOp op = GradientOp::mean;
  bool sparse = false;  // embeddings' gradients travel without their zeros
};

struct ReportConfig {
  std::optional<int64_t> steps_per_print;  // absent: no progress lines
  bool dump_state = false;
  bool wall_clock_breakdown = false;  // where a step's time went, and what limits it
  bool memory_breakdown = false;      // the ledger by role, with those lines
};

/// The section "flops_profiler".
struct FlopsProfilerConfig {
  bool enabled = false;
  double recompute_fwd_factor = 0.0;
  int64_t profile_step = 0;
  int64_t module_depth = 0;  // -1: all
  int64_t top_modules = 0;
  bool detailed = false;
  std::optional<std::string> output_file;  // absent: standard output
};

/// The section "comms_logger".
struct CommsLoggerConfig {
  bool enabled = false;
  bool verbose = false;
  bool prof_all = false;
  std::vector<std::string> prof_ops;  // without prof_all: only these
};

/// The section "tensorboard", which the Python front reads: event files in output_path/job_name.
struct TensorboardConfig {
  bool enabled = false;
  std::string output_path;
  std::string job_name;
};

/// The section "wandb", likewise.
struct WandbConfig {
  bool enabled = false;
  std::optional<std::string> group;
  std::optional<std::string> team;
  std::string project;
};

/// The section "comet", likewise.
struct CometConfig {
  bool enabled = false;
  int64_t samples_log_interval = 0;
  std::optional<std::string> project, workspace, api_key, experiment_name, experiment_key;
  std::optional<bool> online;
  std::optional<std::string> mode;
};

/// The section "csv_monitor": files in output_path/job_name.
struct CsvMonitorConfig {
  bool enabled = false;
  std::string output_path;
  std::string job_name;
};

/// The section "deeptide.jsonl_monitor": output_path/job_name/run.jsonl, which `deeptide report` reads.
struct JsonlMonitorConfig {
  bool enabled = false;
  std::string output_path;
  std::string job_name;
};

/// The section "deeptide.timeline": output_path/trace.rank0.json and so on.
struct TimelineConfig {
  bool enabled = false;
  std::string output_path;
  int64_t start_step = 0;  // the first one recorded, from 1
  int64_t num_steps = 0;
};

/// The patterns of block-sparse attention: DeepSpeed's SparsityConfig classes, one name each.
enum class SparsityMode : uint8_t { dense, fixed, variable, bigbird, bslongformer, local_sliding_window };
enum class AttentionDirection : uint8_t { bidirectional, unidirectional };

/// The section "sparse_attention": which blocks of a sequence attend to which. A mode reads the fields that it has.
struct SparsityConfig {
  SparsityMode mode = SparsityMode::fixed;
  int64_t block = 16;  // elements of a block's side
  bool different_layout_per_head = false;
  int64_t num_local_blocks = 4;
  int64_t num_global_blocks = 1;
  AttentionDirection attention = AttentionDirection::bidirectional;
  bool horizontal_global_attention = false;
  int64_t num_different_global_patterns = 1;
  int64_t num_random_blocks = 0;
  std::vector<int64_t> local_window_blocks = {4};
  std::vector<int64_t> global_block_indices = {0};
  std::optional<std::vector<int64_t>> global_block_end_indices;
  int64_t num_sliding_window_blocks = 3;
};

/// Which tensors a checkpoint has. trainable: without frozen parameters; weights: without optimizer states but masters.
enum class SaveContents : uint8_t { all, trainable, weights };

/// The section "checkpoint".
struct CheckpointConfig {
  bool background = false;     // "async": saves beside training
  bool decoupled = false;      // likewise, in DeepSpeed's words
  int64_t buffer_bytes = 0;    // through which a shard passes to its file
  int64_t snapshot_bytes = 0;  // most memory for state that changes before it is written; 0: by what is available
  SaveContents contents = SaveContents::all;
  bool verify = true;                // a load compares all that it reads with the hashes before it changes anything
  bool load_universal = false;       // without a tag, a load takes the one that `latest_universal` names
  bool node_local = false;           // "use_node_local_storage": each host has a folder of its own
  std::vector<std::string> folders;  // over which each rank's shard is cut; empty: it lies in the checkpoint's
  int64_t keep_last = 0;             // checkpoints of default tags that stay; 0: all
  int64_t keep_every = 0;            // also those of steps that are multiples; 0: none
  bool bf16_moments = false;         // optimizer states other than masters are saved in bf16
  double loss_tolerance = 0;         // relative, of the first loss after a load from the last before the save; 0: any
  std::string preempt_folder;        // "on_preempt": where a run saves that is asked to go; empty: it is not asked
  std::vector<std::string> preempt_signals;  // by which
  double preempt_deadline_s = 0.0;           // from the signal to the end of the save
  int64_t preempt_exit_code = 0;             // with which the program ends then

  bool handles_preemption() const { return !preempt_folder.empty(); }
  bool saves_beside_training() const { return background || decoupled; }
};

struct DataConfig {
  bool drop_last = false;  // "dataloader_drop_last"
};

/// ordered: sums in one order, by pairs of ranks, so that a run repeats bit for bit; transport: in the transport's.
enum class Reduction : uint8_t { ordered, transport };
/// The bits of an element of a gradient that travels.
enum class QuantizedGradients : uint8_t { off = 0, int4 = 4, int8 = 8 };

/// The answer to too many skipped steps in a row.
enum class OnSkipped : uint8_t { skip, raise, rewind };

/// The answer to replicated values that differ between ranks.
enum class OnDrift : uint8_t { warn, sync, stop };

/// Whether a separate thread sums gradients during backward; automatic: if a core is idle.
enum class ReduceThread : uint8_t { automatic, on, off };

/// Deeptide's own section, "deeptide".
struct RuntimeConfig {
  double comm_timeout_s = 0.0;  // of every wait for a peer
  double error_grace_s = 0.0;   // from an error of a call to the rank's next call
  Reduction reduction = Reduction::ordered;
  std::optional<QuantizedGradients> quantized_gradients;
  bool quantized_error_feedback = false;
  ReduceThread reduce_thread = ReduceThread::automatic;
  std::optional<bool> overlap_publish;  // step() returns while the new parameters of stages 1 and 2 are on their way
  bool shared_memory = false;           // false: ranks of one host communicate as if on different hosts
  OnSkipped on_skipped = OnSkipped::skip;
  int64_t skipped_limit = 0;    // steps skipped in a row after which that happens
  int64_t rewind_interval = 0;  // applied steps between two states that are kept for a rewind
  int64_t drift_interval = 0;   // applied steps between two comparisons of what is replicated; 0: none
  OnDrift on_drift = OnDrift::warn;
  bool keep_grad = false;                  // whole reduced gradients in .grad after the last backward of a step
  bool tune_allocator = false;             // keep the pages of large CPU tensors instead of faulting them in again
  int64_t device_memory_cap = 0;           // bytes that the engine itself may take; 0: no limit
  int64_t unit_size = 0;                   // most elements per unit; 0: one repeated block
  bool packed_states = false;              // masters of bf16 parameters keep only what these lack
  DataType moment_dtype = DataType::fp32;  // of optimizer states; bf16: rounded stochastically
  uint64_t seed = 0;
};

/// A parsed ds_config.json. Construction validates every key at every depth; afterwards nothing changes it.
/// Errors: ConfigError (a std::invalid_argument, ValueError in Python) with origin, line, key and the nearest known
/// key.
class DEEPTIDE_API Config {
 public:
  /// Every section, found by its type.
  using Sections =
      std::tuple<BatchConfig, OptimizerConfig, SchedulerConfig, ZeroConfig, OffloadOptimizerConfig, OffloadParamConfig,
                 PlacementConfig, ElasticityConfig, PrecisionConfig, GradientConfig, ReportConfig, FlopsProfilerConfig,
                 CommsLoggerConfig, TensorboardConfig, WandbConfig, CometConfig, CsvMonitorConfig, JsonlMonitorConfig,
                 TimelineConfig, SparsityConfig, DataConfig, CheckpointConfig, RuntimeConfig>;

  Config();  // every key at its default
  static Config from_file(const std::string& path);
  /// `text`: JSON, comments and trailing commas allowed; `origin`: its name in errors, e.g. a path or "<dict>".
  static Config from_text(std::string_view text, const std::string& origin = "<text>");

  /// A copy with the keys of `patch` (JSON: objects merge, null removes a key), validated as a whole.
  Config with(std::string_view patch) const;
  /// A copy without a schedule; its text keeps the section.
  Config without_scheduler() const;

  /// The batch sizes for `world_size` data-parallel ranks; with elasticity enabled, those of the elastic batch.
  /// Errors: ConfigError if the sizes do not multiply (DeepSpeed's wording) or the elastic batch excludes this world.
  BatchSizes batch_sizes(int64_t world_size) const;
  /// The data type of parameters and activations.
  DataType compute_dtype() const;

  const BatchConfig& batch() const { return std::get<BatchConfig>(sections_); }
  const OptimizerConfig& optimizer() const { return std::get<OptimizerConfig>(sections_); }
  const SchedulerConfig& scheduler() const { return std::get<SchedulerConfig>(sections_); }
  const ZeroConfig& zero() const { return std::get<ZeroConfig>(sections_); }
  const OffloadOptimizerConfig& offload_optimizer() const { return std::get<OffloadOptimizerConfig>(sections_); }
  const OffloadParamConfig& offload_param() const { return std::get<OffloadParamConfig>(sections_); }
  const PlacementConfig& placement() const { return std::get<PlacementConfig>(sections_); }
  const ElasticityConfig& elasticity() const { return std::get<ElasticityConfig>(sections_); }
  const PrecisionConfig& precision() const { return std::get<PrecisionConfig>(sections_); }
  const GradientConfig& gradients() const { return std::get<GradientConfig>(sections_); }
  const ReportConfig& report() const { return std::get<ReportConfig>(sections_); }
  const FlopsProfilerConfig& flops_profiler() const { return std::get<FlopsProfilerConfig>(sections_); }
  const CommsLoggerConfig& comms_logger() const { return std::get<CommsLoggerConfig>(sections_); }
  const TensorboardConfig& tensorboard() const { return std::get<TensorboardConfig>(sections_); }
  const WandbConfig& wandb() const { return std::get<WandbConfig>(sections_); }
  const CometConfig& comet() const { return std::get<CometConfig>(sections_); }
  const CsvMonitorConfig& csv_monitor() const { return std::get<CsvMonitorConfig>(sections_); }
  const JsonlMonitorConfig& jsonl_monitor() const { return std::get<JsonlMonitorConfig>(sections_); }
  const TimelineConfig& timeline() const { return std::get<TimelineConfig>(sections_); }
  const SparsityConfig& sparse_attention() const { return std::get<SparsityConfig>(sections_); }
  const DataConfig& data() const { return std::get<DataConfig>(sections_); }
  const CheckpointConfig& checkpoint() const { return std::get<CheckpointConfig>(sections_); }
  const RuntimeConfig& runtime() const { return std::get<RuntimeConfig>(sections_); }
  const Sections& sections() const { return sections_; }

  const std::string& origin() const { return origin_; }
  /// The text as read, for checkpoints.
  const std::string& text() const { return text_; }
  /// One line for each "auto" and absent key, with the value that it took.
  const std::vector<std::string>& decisions() const { return decisions_; }

 private:
  Config(std::string text, std::string origin);

  Sections sections_;
  std::string origin_;
  std::string text_;
  std::vector<std::string> decisions_;
};

/// The JSON Schema (draft 2020-12) of everything that Config accepts, generated from the table of keys.
DEEPTIDE_API std::string config_json_schema();
/// The page docs/config.md, generated from the same table.
DEEPTIDE_API std::string config_markdown();

}  // namespace deeptide
