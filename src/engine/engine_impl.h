// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The parts of an Engine, lowest layer first; destruction runs in the reverse order of members.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/engine.h"
#include "device/memory.h"
#include "engine/bound_model.h"
#include "engine/boundary.h"
#include "engine/carried_state.h"
#include "engine/channels.h"
#include "engine/gradient_intake.h"
#include "engine/kept_gradients.h"
#include "engine/link_report.h"
#include "engine/live_model.h"
#include "engine/partial_load.h"
#include "engine/progress.h"
#include "engine/rewind.h"
#include "engine/stepper.h"
#include "gradients/reducer.h"
#include "optim/rule.h"
#include "sharding/residency.h"
#include "zero/arrivals.h"
#include "zero/policy.h"
#include "zero/sharded_optimizer.h"

namespace deeptide {

/// Builds the parts and forwards each call to its part. Saving, loading and inspecting state involve several parts, so
/// they are methods here: one file each.
struct __attribute__((visibility("hidden"))) Engine::Impl {
  Impl(const ModelDescription& description, const Config& config, const InitOptions& options);
  ~Impl();

  // --- save.cc, load.cc, inspect.cc, export.cc, parameter_state.cc
  std::string save_checkpoint(const std::string& directory, std::string tag, const std::string& client_state_json,
                              bool save_latest, bool exclude_frozen_parameters);
  std::optional<LoadedCheckpoint> load_checkpoint(const std::string& directory, std::string tag,
                                                  const LoadOptions& options);
  std::vector<NamedTensor> module_state_dict(std::optional<int> only_rank);
  void export_safetensors(const std::string& path, const std::vector<NamedTensor>& more);
  at::Tensor full_state(const std::string& name, const std::string& role);
  void set_full_state(const std::string& name, const std::string& role, const at::Tensor& value);
  void broadcast(const at::Tensor& values, int source);
  std::optional<LocalState> local_state(const std::string& name, const std::string& role);
  void set_local_state(const std::string& name, const std::string& role, const at::Tensor& values);

  bool has_gradients() const;

  // --- rebuild.cc
  engine::CarriedState carry_state(const ModelDescription& now, const InitOptions& options);
  void adopt_state(const engine::CarriedState& carried);
  /// With their hyper-parameters of now.
  std::vector<ParameterGroup> groups_now() const;

  // --- offload_states.cc
  void offload_states(const OffloadStates& what);
  void reload_states();

  // --- summary.cc
  std::string summary() const;
  std::vector<MemoryLine> memory() const;

  // --- memory_advice.cc
  /// Settings that would free memory of this rank, and how much; empty if none would.
  std::string memory_advice() const;
  /// Runs a method of the engine's. Errors: what it throws; an OutOfMemoryError also says what the engine holds.
  void explain_memory(const char* method, const std::function<void()>& run) const;

  /// Runs a method of the engine's. Takes back what this rank last told the others of, and tells them of what `run`
  /// throws: they would wait for this rank.
  template <typename Run>
  auto told(const char* method, Run run) {
    check_process(method);
    const auto board = channels.board();  // `run` may end this object
    board->withdraw_error();
    try {
      return run();
    } catch (const std::exception& error) {
      board->report_error(std::string("failed in ") + method, error.what());
      throw;
    }
  }

  /// False in a forked child, which has none of the engine's threads and shares its rings and mappings.
  bool is_ours() const { return ::getpid() == process; }
  /// Errors: ValueError in a forked child.
  void check_process(const char* method) const;

  const pid_t process = ::getpid();
  const Config config;
  std::shared_ptr<device::Ledger> ledger;
  engine::Channels channels;
  engine::InitFailureNotice notice;
  const BatchSizes batch;
  const std::shared_ptr<CustomOptimizer> custom;         // null: the rule steps
  const std::unique_ptr<const optim::Rule> custom_rule;  // null likewise
  const optim::Rule* const rule;                         // null: no optimizer
  zero::StagePolicy policy;
  const std::vector<ParameterGroup> groups;
  engine::BoundModel model;
  const engine::Origin origin;
  engine::LiveModel live;
  engine::LinkReport links;
  std::unique_ptr<sharding::Residency> residency;
  std::unique_ptr<zero::Arrivals> arrivals;           // null: steps wait for what they publish
  std::unique_ptr<gradients::Reducer> reducer;        // null: nothing to train
  std::unique_ptr<tiers::Offload> offloaded;          // null: optimizer states are in memory
  std::unique_ptr<tiers::Offload> away;               // null: offload_states has moved none to files
  int64_t most_bytes_of_states = 0;                   // while it did, if ever
  std::unique_ptr<zero::ShardedOptimizer> optimizer;  // null: nothing to train
  std::unique_ptr<engine::Rewind> rewind;             // null: not asked for, or nothing to train
  std::unique_ptr<engine::KeptGradients> kept;        // null: not asked for, or nothing to train
  std::unique_ptr<engine::GradientIntake> intake;     // null: nothing to train
  engine::Progress progress;
  std::unique_ptr<engine::Boundary> boundary;
  std::unique_ptr<engine::Stepper> stepper;

 private:
  struct StatePlace;

  void make_trainer(const ModelDescription& description);
  bool publishes_late();
  std::vector<zero::UnitForecast> stepped_units(const std::vector<sharding::Unit*>& trainable) const;
  zero::StatePlacement place_states(const std::vector<sharding::Unit*>& trainable, zero::StateTypes& types);
  void check_no_gradients(const char* method) const;
  void check_between_steps(const char* method) const;
  void check_offloading(const OffloadStates& what) const;
  zero::StatePlacement place_away(const OffloadStates& what);
  void check_saving(const std::string& directory) const;
  void check_rebuilding() const;
  std::pair<std::vector<comm::Close>, engine::LooseTensors> enter_alike(comm::Call call,
                                                                        const std::function<void()>& check);
  engine::LooseTensors enter_to_inspect();
  at::Tensor gathered(const sharding::Unit& unit);
  std::string agree_on_tag(const std::string& directory, const std::string& given);
  void go_on_without(const engine::Absent& absent, const std::vector<std::string>& unexpected, engine::Progress& saved);
  void publish_parameters(int64_t rounds_begun);
  void gather(const at::Tensor& whole, const at::Tensor& shard, const std::string& what);
  StatePlace enter_state(const std::string& name, const std::string& role,
                         const std::function<void(const StatePlace&)>& check = {});
  void check_writable(const StatePlace& place, const std::string& role) const;
  at::Tensor custom_state(const StatePlace& place, const std::string& role);
  std::pair<int64_t, at::Tensor> unit_state(const StatePlace& place, const std::string& role);
  at::Tensor whole_unit_state(const StatePlace& place, const std::string& role);
  std::pair<int64_t, int64_t> held_range(const StatePlace& place) const;
  void write_state(const StatePlace& place, const std::string& role, int64_t first, const at::Tensor& values);
};

}  // namespace deeptide
