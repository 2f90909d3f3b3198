// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The parts of an Engine, lowest layer first; destruction runs in the reverse order of members.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "device/memory.h"
#include "engine/bound_model.h"
#include "engine/boundary.h"
#include "engine/channels.h"
#include "engine/gradient_intake.h"
#include "engine/live_model.h"
#include "engine/progress.h"
#include "engine/stepper.h"
#include "gradients/reducer.h"
#include "optim/rule.h"
#include "sharding/residency.h"
#include "zero/policy.h"
#include "zero/sharded_optimizer.h"

namespace deeptide {

/// The data type in which gradients travel.
at::ScalarType reduce_type(const Config& config);
/// Errors: ValueError when `hyper` is not of `optimizer`.
void check_optimizer(const Hyperparameters& hyper, const OptimizerInfo* optimizer);

/// Builds the parts and forwards each call to its part. Saving, loading and inspecting state involve several parts, so
/// they are methods here: one file each.
struct Engine::Impl {
  Impl(const ModelDescription& description, const Config& config, const InitOptions& options);
  ~Impl();

  // --- save.cc, load.cc, inspect.cc, export.cc
  std::string save_checkpoint(const std::string& directory, std::string tag, const std::string& client_state_json,
                              bool save_latest);
  std::optional<LoadedCheckpoint> load_checkpoint(const std::string& directory, std::string tag,
                                                  const LoadOptions& options);
  std::vector<NamedTensor> module_state_dict(std::optional<int> only_rank);
  void export_safetensors(const std::string& path, const std::vector<NamedTensor>& more);
  at::Tensor full_state(const std::string& name, const std::string& role);

  // --- summary.cc
  std::string summary() const;
  std::vector<MemoryLine> memory() const;

  const Config config;
  std::shared_ptr<device::Ledger> ledger;
  engine::Channels channels;
  engine::InitFailureNotice notice;
  const BatchSizes batch;
  const optim::Rule* const rule;  // null: no optimizer
  zero::StagePolicy policy;
  const std::vector<ParameterGroup> groups;
  engine::BoundModel model;
  engine::LiveModel live;
  std::unique_ptr<sharding::Residency> residency;
  std::unique_ptr<gradients::Reducer> reducer;        // null: nothing to train
  std::unique_ptr<zero::ShardedOptimizer> optimizer;  // null: nothing to train
  std::unique_ptr<engine::GradientIntake> intake;     // null: nothing to train
  engine::Progress progress;
  std::unique_ptr<engine::Boundary> boundary;
  std::unique_ptr<engine::Stepper> stepper;

 private:
  void make_trainer();
  void check_saving(const std::string& directory) const;
  engine::LooseTensors enter_to_inspect();
  at::Tensor gathered(const sharding::Unit& unit);
  std::string agree_on_tag(const std::string& directory, const std::string& given);
  void publish_parameters(int64_t rounds_begun);
  void gather(const at::Tensor& whole, const at::Tensor& shard, const std::string& what);
};

}  // namespace deeptide
