// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The calls that a front in another language, such as the Python module, needs besides those of programs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/discovery.h"
#include "deeptide/export.h"
#include "deeptide/world.h"

namespace deeptide {
class Engine;
namespace bench {
class CollectiveBench;
}
namespace tiers {
class Spill;
}
}  // namespace deeptide

namespace deeptide::binding {

/// A schedule's parameters by their names in the configuration's text.
struct SchedulerParameters {
  std::map<std::string, double> numbers;  // flags as 0 and 1
  std::map<std::string, std::string> words;
};

/// Those that have a value; none without a schedule.
DEEPTIDE_API SchedulerParameters scheduler_parameters(const Config& config);

/// A section as JSON, with every key of the table: absent ones have their defaults, null where there is none.
/// Errors: std::logic_error for a path that is no section.
DEEPTIDE_API std::string section_text(const Config& config, std::string_view path);

/// "compression_training" with its defaults, and its groups, as JSON. Errors: ConfigError naming the key.
DEEPTIDE_API std::string compression_section(const Config& config);
DEEPTIDE_API std::string compression_groups(const Config& config);

/// Computes the batch of the section "elasticity". Its `micro` is 0 where `world_size`, a number of ranks, is not one
/// of the valid ones; 0: unknown, which only version 0.1 allows. Errors: ConfigError naming the key.
DEEPTIDE_API ElasticBatch elastic_batch(const ElasticityConfig& config, int64_t world_size);

/// The states that an optimizer keeps of a parameter, by the names that checkpoints give them: "exp_avg".
/// Errors: ConfigError if the library has no such optimizer.
DEEPTIDE_API std::vector<std::string> state_roles(const OptimizerInfo& optimizer);

/// Whether a parameter of this name and shape is a matrix that Muon orthogonalizes, where no group says otherwise.
DEEPTIDE_API bool is_muon_matrix(const std::string& name, const std::vector<int64_t>& sizes);

/// Each kind of kernel, and Highway's name of the instruction set that it runs on here: {"optimizer", "AVX3_ZEN4"}.
DEEPTIDE_API std::vector<std::pair<std::string, std::string>> kernel_targets();

/// Finds this process's place as init_distributed() does, without a connection. Nothing: a world of one.
/// Errors: ConfigError, as there.
DEEPTIDE_API std::optional<Discovery> find_place(const DistributedOptions& options);
/// How long init_distributed() waits. Errors: ConfigError if the option or DEEPSPEED_TIMEOUT is no valid duration.
DEEPTIDE_API std::chrono::milliseconds timeout_of(const DistributedOptions& options);

/// Runs `work`, which reads `tensors` by their addresses and writes those of `written`, as one operator: sharded
/// parameters, and those whose values are on their way, are whole until it ends. Operators within do not wait again.
/// Errors: what `work` throws; CommError, before it runs.
DEEPTIDE_API void run_as_operator(const std::vector<at::Tensor>& tensors, const std::vector<bool>& written,
                                  const std::function<void()>& work);
/// Names the unit of a sharded parameter as long as its engine lives: those of one unit are gathered together. 0 for
/// other tensors.
DEEPTIDE_API uint64_t sharded_unit(const at::Tensor& tensor);

/// Whether the engine has a gradient of a trained parameter since the last step, so that `.grad` is None, and can show
/// it.
enum class TakenGradient : uint8_t { none, showable, hidden };
/// None: there is none, `.grad` shows it, or a backward runs.
DEEPTIDE_API TakenGradient taken_gradient(const Engine& engine, const at::Tensor& parameter);
/// Why gradients that are taken cannot be shown now.
DEEPTIDE_API std::string why_hidden(const Engine& engine);
/// Until the next backward or step, `.grad` of each parameter holds its gradient, which the program may change.
/// Collective, with ranks that are in step().
DEEPTIDE_API void show_gradients(Engine& engine);
/// Drops what backward gave these parameters since the last step, as torch's zero_grad() of a module. Returns whether
/// there was any on this rank; then it is collective. Errors: ValueError if ranks name different ones; CommError.
DEEPTIDE_API bool drop_gradients(Engine& engine, const std::vector<at::Tensor>& of);

struct CollectiveTimes {
  int64_t bytes = 0;            // size, rounded so that ranks have equal slices of whole cache lines
  std::vector<double> seconds;  // per call on the slowest rank; one value per trial
};

/// Times collectives as an engine's groups do them, each checked before. All calls are collective. One per world.
class DEEPTIDE_API CollectiveBench {
 public:
  /// `shared_memory`: false sends all over c10d. Errors: ConfigError for a world of one; CommError.
  CollectiveBench(const World& world, c10::ScalarType dtype, c10::Device device, int64_t max_bytes, bool shared_memory);
  ~CollectiveBench();

  /// The transport in use: "shared memory", "two levels", "c10d".
  std::string path() const;
  int num_hosts() const;
  /// `collective`: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "broadcast". Each trial makes as many
  /// calls as the clock's resolution asks for. Errors: ConfigError for another name; ValueError; CommError.
  CollectiveTimes measure(const std::string& collective, int64_t bytes, int warmups, int trials);

 private:
  std::unique_ptr<bench::CollectiveBench> bench_;
};

/// Keeps what forward saves outside the memory of the engine's device until backward wants it. The engine's ledger
/// counts what that takes; it may outlive the engine. Thread-safe. A forked child may drop tensors, which does nothing.
class DEEPTIDE_API Spill {
 public:
  /// In the host's memory, or, with `folders`, in files there, through `num_blocks` blocks of 4 MiB, at least 4.
  /// Errors: RuntimeError naming a folder that cannot be used.
  Spill(const std::shared_ptr<Engine>& engine, const std::vector<std::string>& folders, int num_blocks);
  ~Spill();

  /// Copies the values of a strided tensor. Returns a number for the two below. Errors: RuntimeError naming the folder.
  int64_t put(const at::Tensor& tensor);
  /// Returns the tensor again, in memory of its own on its device. Errors: as put.
  at::Tensor get(int64_t id);
  void drop(int64_t id) noexcept;
  /// Bytes of the tensors at the fullest moment.
  int64_t peak_bytes() const;

 private:
  void before_host_waits() const;

  std::weak_ptr<Engine> engine_;
  bool waits_;  // the host, for the device
  std::unique_ptr<tiers::Spill> spill_;
};

/// Ratio of bus to algorithm bandwidth, as nccl-tests define them. Errors: ConfigError for an unknown name.
DEEPTIDE_API double bus_factor(const std::string& collective, int world_size);

}  // namespace deeptide::binding
