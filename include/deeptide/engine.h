// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The engine a user holds: backward, step, save, load.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/custom_optimizer.h"
#include "deeptide/errors.h"
#include "deeptide/reports.h"
#include "deeptide/world.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace deeptide {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct ModuleInfo {
  std::string path;  // "h.3.attn"; "" is the model itself
  std::string type;  // "Block"
};

/// Buffers that a model's class wants in fp32 where the model computes in a 16-bit type.
struct Fp32Pattern {
  std::string module;      // the path of a module of that class
  std::string pattern;     // in the name of a buffer below it; "*" stands for any characters
  bool fp16_only = false;  // not where it computes in bf16
};

/// A model as the engine sees it, in whichever language it is written.
struct ModelDescription {
  std::vector<NamedTensor> parameters;              // every name in module order; tied parameters once per name
  std::vector<NamedTensor> buffers;                 // that checkpoints hold
  std::vector<ModuleInfo> modules;                  // pre-order
  std::vector<NamedTensor> transient_buffers = {};  // that only compute (Python's persistent=False)
  std::vector<Fp32Pattern> in_fp32 = {};
};

/// One optimizer group: names from ModelDescription::parameters and their hyper-parameters, of the engine's optimizer.
struct ParameterGroup {
  std::vector<std::string> parameters;
  Hyperparameters hyperparameters;
};

namespace engine {
struct Axes;
}  // namespace engine

struct InitOptions {
  std::optional<World> world;            // absent: init_distributed()
  std::vector<ParameterGroup> groups;    // empty: one group of all trainable parameters
  std::optional<std::string> optimizer;  // its type, "AdamW"; "": none; absent: the configuration's
  /// Describes the model as it is when called: at every save, load and export, for modules rebind buffers and replace
  /// parameters. Absent: the model stays what it was.
  std::function<ModelDescription()> describe = {};
  /// The buffers of `describe` alone: called at the end of each step. Absent: they are known as of the last `describe`.
  std::function<std::vector<NamedTensor>()> buffers = {};
  /// Steps in the place of `optimizer`. Its groups have hyper-parameters of its info().
  std::shared_ptr<CustomOptimizer> custom = {};
  /// Axes beside the data axis, as pipeline_axes gives them. Null: there are none.
  std::shared_ptr<const engine::Axes> axes = {};
};

/// The effect of Engine::step() on the parameters.
enum class StepResult : uint8_t {
  applied,       // stepped them
  accumulating,  // left them: more micro-batches come first
  non_finite,    // left them, and every state: a gradient is not finite
};

/// The report of one call of Engine::step().
struct StepOutcome {
  StepResult result = StepResult::accumulating;
  int64_t step = 0;           // applied + skipped optimizer steps so far
  double lr = 0.0;            // of the first group, as used by this step
  double grad_norm = 0.0;     // global L2 norm before clipping; NaN if not at a boundary
  double clipped_norm = 0.0;  // after clipping
  double loss_scale = 1.0;    // that this step's gradients had; norms are without it
  std::string reason;         // for people, if not applied: "accumulating 2/4", "non-finite gradient"
  std::string parameter;      // first bad parameter
  int rank = -1;              // rank that produced it
  std::string place;          // its coordinates, " (pipeline 1, data 0)"; empty where data is the only axis
  std::string phase;          // where: "forward" if its loss was not finite already, else "backward"; else empty
  int64_t sent_bytes = 0;     // by this rank to others since the last step: gradients, and parameters made whole
  /// The loss by rounding of all ranks' gradients since the last step, where they travel in few bits, else 0: its
  /// root mean square over theirs, and the most that an element lost over the largest magnitude of its block.
  double rounding = 0.0, largest_rounding = 0.0;
  std::string saved;        // the folder of a checkpoint that is complete since the last step, saved beside training
  std::string save_error;   // why one was not saved, with the rank and the file; training goes on
  bool preempted = false;   // "on_preempt": a rank was asked to go, and all save after this step
  int64_t rewound_to = -1;  // the step after which the state was that this call has brought back; -1: none
  bool kept = false;        // the state before this step was copied, for a later call to bring back
  bool applied() const { return result == StepResult::applied; }
  explicit operator bool() const { return applied(); }
};

/// The purpose of memory.
enum class MemoryRole : uint8_t { parameters, gradients, optimizer_states, gathered, communication };
/// "parameters", "gradients", "optimizer states", "gathered peak", "communication".
DEEPTIDE_API const char* text(MemoryRole role);

/// One line of the memory table. Units: bytes on this rank.
struct MemoryLine {
  MemoryRole role = MemoryRole::parameters;
  int64_t predicted_bytes = 0;      // while ranks keep pace
  int64_t measured_bytes = 0;       // allocated by the engine, at its peak, without `measured_late_bytes`
  int64_t late_bytes = 0;           // at most so many more while another rank is late, or this one runs backward twice
  int64_t measured_late_bytes = 0;  // allocated for that, at their peak
  int64_t off_device_bytes = 0;     // predicted, in the host's memory, beside an accelerator's
  int64_t measured_off_device_bytes = 0;
};

/// A loaded checkpoint: its folder, and its `client_state` as JSON text.
struct LoadedCheckpoint {
  std::string path;
  std::string client_state_json;
};

/// This rank's part of one parameter's state: consecutive elements of the flattened parameter.
struct LocalState {
  int64_t begin = 0;  // the first one's index
  at::Tensor values;  // (elements,) fp32, on the CPU
};

/// The states that Engine::offload_states moves, and their destination.
struct OffloadStates {
  /// nvme: files. cpu: the host's memory, where a CPU engine has them anyway.
  OffloadDevice to = OffloadDevice::nvme;
  std::vector<std::string> folders;  // of the files; empty: the configuration's nvme_path
  bool moments = true;
  bool masters = true;    // of 16-bit parameters; packed ones: what they keep beside these
  bool gradients = true;  // memory of their sums, which are empty between two steps
};

struct SaveOptions {
  bool save_latest = true;
  bool exclude_frozen_parameters = false;  // as an adapter's base: a load leaves them as they are
  std::optional<bool> blocking;            // absent: as the configuration's "checkpoint" says
  std::optional<SaveContents> contents;    // likewise
  bool in_handler = false;                 // of an exception: saves the last step's end; ranks in step() may come yet
};

/// Thrown by step(), which has changed nothing: another rank saves in the handler of an exception. This rank may save
/// as well, or end.
class DEEPTIDE_API SaveMeetsStepError : public CommError {
 public:
  using CommError::CommError;
};

struct LoadOptions {
  bool strict = true;
  bool optimizer_states = true;
  bool lr_scheduler_states = true;
  bool module_only = false;
};

/// Shards, gathers, reduces and steps one model. Movable; destruction returns every byte.
/// All ranks must call each method marked "Collective".
class DEEPTIDE_API Engine {
 public:
  Engine(const ModelDescription& model, const Config& config, const InitOptions& options = {});
  ~Engine();
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;

  /// Runs autograd from a scalar, as `loss.backward()` does, but checks first. Gradients of several calls add up.
  /// Errors: ValueError if the loss is not a scalar or needs no gradient, or the engine has no optimizer.
  void backward(const at::Tensor& loss, bool retain_graph = false);
  /// Collective. Ends the micro-batch; at an accumulation boundary reduces, clips, steps and publishes parameters.
  /// Errors: ValueError if no rank has a gradient (step before backward); CommError.
  StepOutcome step();
  /// Collective. Takes part in the others' steps until all ranks have joined: ranks may have different numbers of
  /// batches.
  void join();
  /// Collective. One step of `join`, for callers that act at each step; empty once all ranks have joined.
  std::optional<StepOutcome> join_step();
  /// Collective. Drops the gradients accumulated so far, and those in `.grad` of the trained parameters.
  void zero_grad();
  /// Whether this rank has a gradient that zero_grad() would drop, whoever ran backward.
  bool has_gradients() const;
  /// Whether a checkpoint saved now would be of the last step's end: this rank has begun what the next one is to be of.
  bool is_within_accumulation() const;

  bool is_gradient_accumulation_boundary() const;
  void set_gradient_accumulation_boundary(std::optional<bool> boundary);
  int64_t global_steps() const;
  /// The share of optimizer states in files that "ratio": "auto" has chosen; nothing if the configuration gives one.
  std::optional<double> offload_ratio() const;
  int64_t skipped_steps() const;
  int64_t micro_steps() const;
  int64_t global_samples() const;
  BatchSizes batch_sizes() const;
  const World& world() const;
  const Config& config() const;
  at::Device device() const;

  /// The factor of the next backward's loss; 1 unless the model computes in fp16.
  double loss_scale() const;

  /// Optimizer groups; 0 without an optimizer.
  int64_t num_groups() const;
  Hyperparameters hyperparameters(int64_t group) const;
  /// Errors: ValueError when the hyper-parameters are another optimizer's.
  void set_hyperparameters(int64_t group, const Hyperparameters& value);
  /// Changes whenever the engine itself changed hyper-parameters: its schedule, a checkpoint, the leading rank's.
  int64_t hyperparameters_version() const;
  std::vector<std::string> group_parameters(int64_t group) const;

  /// Collective. `client_state_json`: any JSON object. Returns the path of the checkpoint's folder. Without `blocking`
  /// it returns at once: a thread writes the state of now while training goes on, the folder appears when all ranks
  /// have written, and a later outcome of step() says so, or why not. One such save at a time: the next one, a load and
  /// the engine's end wait for it. Errors: CheckpointError naming the file.
  std::string save_checkpoint(const std::string& directory, const std::string& tag,
                              const std::string& client_state_json, const SaveOptions& options);
  std::string save_checkpoint(const std::string& directory, const std::string& tag = "",
                              const std::string& client_state_json = "{}", bool save_latest = true,
                              bool exclude_frozen_parameters = false);
  /// Whether half of the deadline of "on_preempt" is over since a rank was asked to go: a program that does not come to
  /// a step soon, since it evaluates, then calls preempt(). Looks at the other ranks once a second.
  bool should_preempt();
  /// Collective, with ranks that are in step() too: returns once all ranks stand between the same two steps, and drops
  /// gradients of the one to come. Then save.
  void preempt();
  /// Collective. Waits for a save beside training. Returns the folder of the last one that no outcome has told of;
  /// empty if there is none. Errors: CheckpointError naming the rank and the file, if it was not saved.
  std::string wait_for_save();
  /// Collective. Empty if `tag` is empty and no `latest` exists. Without `strict`, what the checkpoint or the model
  /// lacks is told; what the checkpoint lacks stays as it is, and states of a weight that it has begin anew. Errors:
  /// CheckpointError listing what does not fit, with nothing changed; naming what is damaged, with nothing changed if
  /// the engine had taken a step or loaded before. If not, or if a read fails, steps and saves are errors until a load
  /// succeeds.
  std::optional<LoadedCheckpoint> load_checkpoint(const std::string& directory, const std::string& tag = "",
                                                  const LoadOptions& options = {});
  /// Collective. Returns whole parameters (compute type) and buffers by name, on the CPU: on this rank, or, with
  /// `only_rank`, on that rank, and nothing on the others.
  std::vector<NamedTensor> module_state_dict(std::optional<int> only_rank = std::nullopt);
  /// Collective, over all stages of a pipeline. Writes the whole model into one safetensors file, on rank 0, unit by
  /// unit: no rank holds more than one whole unit besides its own memory. `more`: tensors of this rank that the file
  /// holds as well. `exclude_frozen`: without parameters that are not trained. Errors: CheckpointError, on all ranks;
  /// no file is left then.
  void export_safetensors(const std::string& path, const std::vector<NamedTensor>& more = {},
                          bool exclude_frozen = false);
  /// Collective. Returns on rank 0 what export_safetensors would write, on the CPU, and nothing on the others.
  std::vector<NamedTensor> whole_model(bool exclude_frozen = false);
  /// Collective. Returns the whole fp32 value of one parameter or optimizer state; role: "master", "gradient", or one
  /// of the optimizer's states, such as "exp_avg". Undefined if the parameter has none.
  at::Tensor full_state(const std::string& parameter, const std::string& role);
  /// Collective. Overwrites what full_state returns. Parameters follow their masters at once; a gradient is the sum
  /// that the next step uses, before clipping. Shapes: `value` as the parameter, equal on all ranks. Errors: ValueError
  /// if the parameter is not optimized, the role is unknown, or the values differ between ranks.
  void set_full_state(const std::string& parameter, const std::string& role, const at::Tensor& value);
  /// Collective. Overwrites `values` with rank `source`'s. Shapes and types: equal on all ranks. Errors: ValueError
  /// if `source` is no rank.
  void broadcast(const at::Tensor& values, int source);
  /// Collective. Returns the mean of the ranks' values, the same on every rank.
  double mean(double value);
  /// Collective. As full_state, but only the elements that this rank holds: its slice, or all at stage 0.
  std::optional<LocalState> local_state(const std::string& parameter, const std::string& role);
  /// Collective. Overwrites the elements that local_state returns. Errors: as set_full_state.
  void set_local_state(const std::string& parameter, const std::string& role, const at::Tensor& values);
  /// Collective, between steps. Takes `model` as it is now: parameters that were added, replaced, taken out, frozen or
  /// unfrozen, and other groups. What the engine trained before goes on bit for bit, by tensor and not by name; what is
  /// new begins as at construction. Ranks hold the states twice meanwhile, and whole parameters. Errors: ValueError
  /// between backward() and step(), with states in files, and with an optimizer of the program's own; ConfigError on
  /// ranks that differ. Nothing is changed then. Any other error ends the engine.
  void rebuild(const ModelDescription& model, const InitOptions& options = {});
  /// Whether a rebuild has failed half-way: the engine can then only be destroyed.
  bool ended() const { return impl_ == nullptr; }
  /// Tells the other ranks that `event` ("failed in forward") happened to this one, with the first line of `text`: they
  /// end their waits for it, unless it goes on soon. The engine's own methods report what they throw; a program that
  /// catches an error of its forward, and keeps the engine, reports it here.
  void report_error(const std::string& event, const std::string& text);
  /// Takes the report back: this rank goes on. Every collective method and backward() do so too.
  void withdraw_error();
  /// At the end of the process that serves the ranks' store, after an error of its own: reports the end, and waits
  /// until the others have ended as well, at most so long, for they read there why. Units: seconds.
  void let_others_end(double seconds);
  /// The program may have changed the model's parameters: the next step() looks at the model.
  void expect_model_changes();
  /// Collective. Between two steps: moves states out of memory, which goes back to the system, for a phase that needs
  /// it, such as generation. Parameters stay; evaluation, saves, loads and reads of state go on; a step is an error
  /// until reload_states. Errors: ValueError between backward and step, with the caller's own optimizer, with states in
  /// files already, without a folder; RuntimeError on all ranks if a disk is full, with all states in memory again.
  void offload_states(const OffloadStates& what = {});
  /// Collective. Brings them back. Errors: ValueError if none are away.
  void reload_states();
  /// Collective. Releases the units that stage 3 has gathered.
  void empty_partition_cache();

  std::vector<MemoryLine> memory() const;
  int64_t live_gathered_bytes() const;
  int64_t peak_gathered_bytes() const;
  /// Returns the lines printed at start: dtypes, units, stage, decisions.
  std::string summary() const;

  /// Says that the program has its batch and calls its model now, so that breakdowns tell data from forward. `tokens`:
  /// of this rank's batch, for rates. Where no one says so, time between steps counts as forward.
  void begin_forward(int64_t tokens = 0);
  /// How this rank spent the last step, with "wall_clock_breakdown" or "deeptide.jsonl_monitor".
  StepTimes step_times() const;
  /// Names what limits the steps since the last line of a breakdown, with figures and a setting that would help; empty
  /// without a breakdown, and before the third step.
  std::string limit() const;
  /// The engine's collectives, with "comms_logger".
  std::vector<CollectiveLine> collectives() const;
  /// A table of these with DeepSpeed's columns, and the ranks that are late.
  std::string collectives_text() const;
  /// Keeps scalars of each step for take_events(), for monitors of the program's own. All ranks call it.
  void keep_events();
  /// The scalars of the steps since the last call, on rank 0; nothing elsewhere.
  std::vector<MonitorEvent> take_events();
  /// The program profiles its modules itself: the engine leaves "flops_profiler" to it.
  void leave_profile_to_program();

 private:
  friend class PipelineStage;
  friend struct EngineAccess;
  struct Impl;
  void drop();

  std::unique_ptr<Impl> impl_;
};

/// Lists a C++ model's parameters, buffers and modules by name.
DEEPTIDE_API ModelDescription describe(torch::nn::Module& model);
/// Returns `options` under which `optimizer` steps the model that it was made for: torch's own, or one of the
/// program's. It stays as it is, with its groups and their learning rates, which are read before each step.
/// `elementwise`: says of a class that is not torch's that it steps each element by itself, as it must from stage 1 on.
/// Errors: ValueError on LBFGS, and on a parameter that is not the model's.
DEEPTIDE_API InitOptions with_optimizer(torch::nn::Module& model, std::shared_ptr<torch::optim::Optimizer> optimizer,
                                        InitOptions options = {}, bool elementwise = false);
/// Looks at the model again at every save, load and export: it must outlive the engine's last such call.
DEEPTIDE_API Engine initialize(torch::nn::Module& model, const Config& config, const InitOptions& options = {});

}  // namespace deeptide
