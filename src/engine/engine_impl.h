// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an Engine holds, lowest layer first; the order of members is the order of destruction in reverse.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "deeptide/engine.h"
#include "device/memory.h"
#include "engine/bound_model.h"
#include "gradients/hooks.h"
#include "gradients/reducer.h"
#include "host/host.h"
#include "optim/rule.h"
#include "optim/schedule.h"
#include "sharding/residency.h"
#include "world/failure_board.h"
#include "world/mesh.h"
#include "zero/policy.h"
#include "zero/sharded_optimizer.h"

namespace deeptide {

/// What the ranks do together; a rank that does something else is told so instead of hanging.
enum class Operation : int64_t { step, save_checkpoint, load_checkpoint, gather_state, release, zero_grad };
const char* operation_name(Operation operation);

// comm::Message::numbers of a close, by position.
inline constexpr int kOperation = 0;
inline constexpr int kRounds = 1;

/// The type in which gradients travel.
at::ScalarType reduce_type(const Config& config);
/// Errors: ValueError when `hyper` is not of `optimizer`.
void check_optimizer(const Hyperparameters& hyper, const OptimizerInfo* optimizer);

/// Tells the other ranks when this one fails while it is being constructed.
struct Start {
  explicit Start(std::shared_ptr<world::FailureBoard> failure_board) : board(std::move(failure_board)) {}
  ~Start() {
    if (!succeeded) board->report_failure("failed in initialize; see its error");
  }
  std::shared_ptr<world::FailureBoard> board;
  bool succeeded = false;
};

struct Engine::Impl {
  Impl(const ModelDescription& description, const Config& config, const InitOptions& options);
  ~Impl();

  // --- step.cc
  void backward(const at::Tensor& loss, bool retain_graph);
  /// `joined`: this rank has no more batches. Empty when all ranks have joined.
  std::optional<StepOutcome> step(bool joined);
  bool is_boundary() const;
  void set_boundary(std::optional<bool> boundary);
  void zero_grad();
  /// Collective. All ranks are at the same operation and need no more units.
  std::vector<comm::Message> enter(Operation operation, comm::Message own = {});
  /// Of gradients; what the ranks said on entering.
  static int64_t most_rounds(const std::vector<comm::Message>& messages);

  // --- state.cc
  struct Progress {
    int64_t global_steps = 0, skipped_steps = 0, micro_steps = 0, optimizer_steps = 0, schedule_iteration = -1;
    std::vector<Hyperparameters> hyperparameters;
    at::Tensor cpu_generator, device_generator;
  };
  std::string save_checkpoint(const std::string& directory, std::string tag, const std::string& client_state_json,
                              bool save_latest);
  std::optional<LoadedCheckpoint> load_checkpoint(const std::string& directory, std::string tag,
                                                  const LoadOptions& options);
  std::vector<NamedTensor> module_state_dict();
  at::Tensor full_state(const std::string& name, const std::string& role);

  // --- summary.cc
  std::string summary() const;
  std::vector<MemoryLine> memory() const;

  Config config;
  World world;
  world::Mesh mesh;
  BatchSizes batch;
  zero::StagePolicy policy;
  const optim::Rule* rule;  // null: no optimizer
  std::shared_ptr<device::Ledger> ledger;
  std::shared_ptr<world::FailureBoard> board;
  std::shared_ptr<host::Host> host;
  comm::Group control;     // small messages, always on the CPU
  comm::Group gathers;     // parameters
  comm::Group reductions;  // gradients
  Start start;             // ends before the groups do: the other ranks read its word, not of a broken connection
  engine::BoundModel model;
  std::unique_ptr<sharding::Residency> residency;
  std::unique_ptr<gradients::Reducer> reducer;        // null: nothing to train
  std::unique_ptr<zero::ShardedOptimizer> optimizer;  // null: nothing to train
  std::unique_ptr<gradients::GradientHooks> hooks;
  std::vector<ParameterGroup> groups;
  std::vector<Hyperparameters> hyperparameters;  // live, by group; none without an optimizer
  std::vector<Hyperparameters> base_hyperparameters;
  std::unique_ptr<optim::Schedule> schedule;
  int64_t schedule_iteration = -1;

  int64_t global_steps = 0;
  int64_t skipped_steps = 0;
  int64_t micro_steps = 0;
  std::optional<bool> boundary_override;

 private:
  void install_hooks();
  void publish_parameters(int64_t rounds_begun);
  void restore_progress(const Progress& saved, bool moments, const LoadOptions& options);
  std::vector<comm::Message> enter_step(bool joined);
  std::vector<comm::Message> judge();
  void end_micro_batch();
  void note_external_writes();
  void take_private_writes(const std::vector<comm::Message>& messages);
  bool has_private_writes() const;
  StepOutcome accumulate_outcome() const;
  void print_step(const StepOutcome& outcome) const;
  StepOutcome apply(double total_of_squares, const std::vector<comm::Message>& messages);
};

}  // namespace deeptide
