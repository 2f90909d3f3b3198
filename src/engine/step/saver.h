// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves beside training, one at a time: ranks agree at their boundaries that all have written, and then that it stands.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/save/background_save.h"
#include "comm/messages.h"
#include "engine/bind/channels.h"
#include "engine/run/exit_hook.h"
#include "engine/run/termination_hold.h"
#include "engine/step/boundary.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::engine {

/// How a save beside training ended.
struct SaveResult {
  std::string path;   // of the checkpoint's folder
  std::string error;  // names the rank and the file; empty: the checkpoint stands
};

class Saver {
 public:
  /// `optimizer`: null: none. `lost_peers`: becomes true once a rank may never answer again. All outlive this.
  Saver(Channels& channels, const CheckpointConfig& config, zero::ShardedOptimizer* optimizer,
        std::shared_ptr<const std::atomic<bool>> lost_peers)
      : channels_(channels), config_(config), optimizer_(optimizer), lost_peers_(std::move(lost_peers)) {}
  /// Finishes a save without the other ranks' word: rank 0 looks for their files. Only hosts with folders of their own
  /// must meet once more. An error is logged. std::exit on the thread that saves does the same.
  ~Saver() { finish_alone(); }
  Saver(const Saver&) = delete;

  /// Equal on all ranks.
  bool in_flight() const { return save_ != nullptr; }
  /// Collective; none is in flight. Returns once the state that steps do not announce is copied. `since`: when the call
  /// that saves was made. `boundary` outlives this.
  void begin(checkpoint::SavePlan plan, std::chrono::steady_clock::time_point since, Boundary& boundary);
  checkpoint::SavePhase phase() const { return save_ ? save_->phase() : checkpoint::SavePhase::none; }
  /// Collective: what all ranks said of themselves as they met. Stages of a pipeline hear of each other in meet_stages.
  void follow(const std::vector<comm::Close>& closes);
  /// Collective over the mesh, at the end of a step.
  void meet_stages();
  /// Collective over the mesh, within a method that all ranks are in. Waits until no save is in flight.
  void finish();
  /// How the last save ended, once.
  std::optional<SaveResult> take_result() { return std::exchange(result_, std::nullopt); }

 private:
  using Phases = std::vector<checkpoint::SavePhase>;

  void advance(const Phases& phases);
  void begin_commit();
  void fail(const std::string& error);
  void finish_alone();
  void leave();
  void leave_hosts();
  void succeed();
  std::string path() const;
  int64_t most_kept_bytes() const;
  void end(SaveResult result);

  Channels& channels_;
  const CheckpointConfig& config_;
  zero::ShardedOptimizer* optimizer_;
  const std::shared_ptr<const std::atomic<bool>> lost_peers_;
  std::unique_ptr<checkpoint::BackgroundSave> save_;  // null: none is in flight
  std::unique_ptr<TerminationHold> hold_;
  std::unique_ptr<ExitHook> exit_hook_;
  Boundary* boundary_ = nullptr;                // null: there was no save yet
  Phases of_stage_;                             // when this stage's ranks met last
  std::vector<uint8_t> leaders_;                // whether each rank commits; empty: not all have written
  std::chrono::nanoseconds call_{0}, wait_{0};  // that training has stood still: in the call, and for the save's end
  std::optional<SaveResult> result_;
};

}  // namespace deeptide::engine
