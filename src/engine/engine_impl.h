// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The parts of an Engine, lowest layer first; destruction runs in the reverse order of members.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/engine.h"
#include "device/memory/memory.h"
#include "engine/bind/bound_model.h"
#include "engine/bind/channels.h"
#include "engine/bind/live_model.h"
#include "engine/bind/settle.h"
#include "engine/run/last_boundary.h"
#include "engine/run/preemption.h"
#include "engine/run/progress.h"
#include "engine/run/rewind.h"
#include "engine/step/boundary.h"
#include "engine/step/gradient_intake.h"
#include "engine/step/kept_gradients.h"
#include "engine/step/link_report.h"
#include "engine/step/saver.h"
#include "engine/step/stepper.h"
#include "gradients/reducer.h"
#include "report/reporter.h"
#include "sharding/residency.h"
#include "zero/sharded_optimizer.h"
#include "zero/transfers/arrivals.h"

namespace deeptide {

namespace checkpoint {
class Reader;
}
namespace engine {
class Absent;
class RoundingErrorLoad;
struct CarriedAsBefore;
struct CarriedState;
struct Listed;
struct ModelTaker;
}  // namespace engine

/// Builds the parts and forwards each call to its part. Saving, loading and inspecting state involve several parts, so
/// they are methods here: one file each.
struct __attribute__((visibility("hidden"))) Engine::Impl {
  Impl(const ModelDescription& description, const Config& config, const InitOptions& options);
  ~Impl();

  // --- save.cc, load.cc, inspect.cc, whole_model.cc, export.cc, parameter_state.cc
  std::string save_checkpoint(const std::string& directory, std::string tag, const std::string& client_state_json,
                              const SaveOptions& options);
  bool has_trained() const;
  LoadedCheckpoint end_load(const std::string& path, const checkpoint::Reader& reader, const LoadOptions& options);
  std::optional<LoadedCheckpoint> load_checkpoint(const std::string& directory, std::string tag,
                                                  const LoadOptions& options);
  std::vector<NamedTensor> module_state_dict(std::optional<int> only_rank);
  void export_safetensors(const std::string& path, const std::vector<NamedTensor>& more, bool exclude_frozen);
  std::vector<NamedTensor> whole_model(bool exclude_frozen);
  at::Tensor full_state(const std::string& name, const std::string& role);
  void set_full_state(const std::string& name, const std::string& role, const at::Tensor& value);
  void broadcast(const at::Tensor& values, int source);
  double mean(double value);
  std::optional<LocalState> local_state(const std::string& name, const std::string& role);
  void set_local_state(const std::string& name, const std::string& role, const at::Tensor& values);

  bool has_gradients() const;
  bool is_within_accumulation() const;
  std::vector<at::Tensor> rounding_errors() const {
    return reducer ? reducer->rounding_errors() : std::vector<at::Tensor>();
  }

  // --- idioms.cc
  /// Whether the engine has a parameter's gradient, and can show it.
  enum class Taken : uint8_t { none, showable, hidden };
  Taken taken_gradient(const at::Tensor& parameter) const;
  /// Why a program cannot look at gradients now; empty: it can.
  std::string why_hidden() const;
  engine::KeptGradients* keep_gradients();
  /// Collective where this rank has any. Drops what these parameters got since the last step; returns whether it did.
  bool drop_gradients(const std::vector<at::Tensor>& of);

  // --- rebuild.cc
  engine::CarriedState carry_state(const ModelDescription& now, const InitOptions& options);
  void adopt_state(const engine::CarriedState& carried);
  engine::CarriedAsBefore as_before() const;
  /// Collective. Makes this engine, built over the model as it was, what it was in all else.
  void restore_as_before(const engine::CarriedState& carried);
  /// The errors that rounding and signs have left, by unit: the tensors themselves.
  std::vector<at::Tensor> errors() const;

  // --- offload_states.cc
  void offload_states(const OffloadStates& what);
  void reload_states();

  // --- summary.cc
  std::string brief() const;
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
    const auto lost = lost_peers;
    board->withdraw_error();
    try {
      return run();
    } catch (const std::exception& error) {
      const bool meets_save =
          dynamic_cast<const SaveMeetsStepError*>(&error) != nullptr;  // after which ranks may go on
      if (!meets_save && dynamic_cast<const CommError*>(&error)) *lost = true;
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
  const std::shared_ptr<CustomOptimizer> custom;  // null: the rule steps
  engine::Settled settled;
  const engine::Design& design = settled.design;
  engine::BoundModel model;
  const engine::Origin origin;
  engine::LiveModel live;
  engine::LastBoundary last;
  engine::LinkReport links;
  report::Reporter reporter;
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
  bool has_loaded = false;  // a checkpoint, at least once
  std::unique_ptr<engine::Boundary> boundary;
  const std::shared_ptr<std::atomic<bool>> lost_peers = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<engine::Saver> saver;
  std::unique_ptr<engine::Preemption> preemption;
  std::unique_ptr<engine::Stepper> stepper;

 private:
  struct StatePlace;

  report::Reporting reporting();
  void make_trainer();
  void serve_tensor_team();
  bool publishes_late();
  void measure_ratio();
  zero::StatePlacement place_states();
  void check_no_gradients(const char* method) const;
  void restore_last_boundary(std::vector<NamedTensor>& buffers) const;
  void check_offloading(const OffloadStates& what) const;
  zero::StatePlacement place_away(const OffloadStates& what);
  void check_saving(const std::string& directory) const;
  std::set<std::string> names_of_other_stages(const std::vector<NamedTensor>& loose);
  /// A save that all ranks agree on. `within`: an accumulation, so that the last boundary's state is saved.
  struct NamedSave {
    checkpoint::SaveTarget target;
    bool within = false;
  };
  NamedSave name_save(const std::string& directory, std::string tag, const SaveOptions& options, bool blocking);
  checkpoint::Snapshot take_snapshot(engine::LooseTensors& loose, const engine::Generators& generators,
                                     bool exclude_frozen, nlohmann::json& state);
  void save_now(const checkpoint::SavePlan& plan);
  void check_rebuilding() const;
  std::pair<std::vector<comm::Close>, engine::LooseTensors> enter_alike(comm::Call call,
                                                                        const std::function<void(comm::Close&)>& check);
  engine::LooseTensors enter_to_inspect();
  std::vector<engine::Listed> listed(const sharding::Unit& unit, const engine::LiveNames& names) const;
  void visit_model(const std::vector<NamedTensor>& more, bool exclude_frozen, const engine::ModelTaker& taker);
  at::Tensor gathered(const sharding::Unit& unit);
  at::Tensor whole_parameter(const sharding::Parameter& p, const at::Tensor& unit, int tensor = 0);
  std::string agree_on_tag(const std::string& directory, const std::string& given, const LoadOptions& options);
  void go_on_without(const engine::Absent& absent, const std::vector<std::string>& unexpected, engine::Progress& saved);
  void publish_parameters(int64_t rounds_begun, const engine::RoundingErrorLoad& errors);
  void gather(const sharding::Unit& unit, const at::Tensor& whole, const at::Tensor& shard, const std::string& what);
  void check_axes(const char* method, bool may_be_cut) const;
  StatePlace enter_state(const std::string& name, const std::string& role,
                         const std::function<void(const StatePlace&)>& check = {});
  void check_writable(const StatePlace& place, const std::string& role) const;
  at::Tensor custom_state(const StatePlace& place, const std::string& role);
  std::pair<int64_t, at::Tensor> unit_state(const StatePlace& place, const std::string& role);
  at::Tensor whole_unit_state(const StatePlace& place, const std::string& role);
  std::pair<int64_t, int64_t> held_range(const StatePlace& place) const;
  void write_state(const StatePlace& place, const std::string& role, int64_t first, const at::Tensor& values);
};

/// Names the above for functions that are no members of an engine.
struct EngineAccess {
  using Impl = Engine::Impl;
  static const Impl& impl_of(const Engine& engine) { return *engine.impl_; }
  static Impl& impl_of(Engine& engine) { return *engine.impl_; }
};

}  // namespace deeptide
