// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table of units: all that configuration, model and topology decide, without memory and without asking a rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "engine/design/model_facts.h"
#include "engine/design/topology.h"
#include "gradients/reducer_options.h"
#include "optim/rules/rule.h"
#include "sharding/residency.h"
#include "sharding/unit.h"
#include "tiers/offload.h"
#include "zero/states/offloaded_parameters.h"
#include "zero/states/policy.h"
#include "zero/states/state_forecast.h"

namespace deeptide::engine {

/// How a unit's gradients reach the ranks that step them.
enum class Route : uint8_t {
  none,           // it is not trained
  alone,          // one rank has all contributions
  shared_memory,  // ranks of one host read each other's buckets
  by_hosts,       // a host sums before its ranks send over the network
  all_to_all,     // each rank receives the rows of its slice
  quantized,      // likewise, in few bits
  transport       // summed in the order that the transport chooses
};

/// Elements of this rank by the memory that has them. On a CPU, `device` is its memory and `host` is 0.
struct Tiers {
  int64_t device = 0;
  int64_t host = 0;
  int64_t files = 0;
};

/// The decisions for one unit.
struct UnitRow {
  sharding::UnitLayout layout;
  sharding::UnitPlacement place;
  int64_t divisor = 1;   // of its mean gradient, beside the accumulation
  int kind = 0;          // as ParameterSpec::kind
  std::set<int> groups;  // of its parameters
  Route route = Route::none;
  bool mostly_zero = false;                 // its gradients travel without their zeros
  bool saves = true;                        // this rank writes its slice into checkpoints
  Tiers parameters;                         // of the slice, or of the copy, that this rank keeps
  Tiers gradients;                          // sums, if it is trained
  Tiers states;                             // that this rank steps there
  std::vector<zero::StateForecast> placed;  // of these, masters and moments one by one, and what files have of each
  zero::ShardPlace shard = {};              // of a sharded unit whose slice may lie elsewhere

  /// Whether the slice lies off the device that trains it, on its host or in files.
  bool off_device = false;
};

/// A channel of tensors that the rows need.
struct ChannelRow {
  enum class Purpose : uint8_t { gathers, reductions };

  comm::Team team;
  Purpose purpose;
};

struct Design {
  Topology topology;
  ModelFacts model;
  std::shared_ptr<const optim::Rule> rule;       // null: nothing is trained
  bool steps_whole = false;                      // the caller's optimizer steps whole parameters
  std::vector<Hyperparameters> hyperparameters;  // by group
  zero::StagePolicy policy;
  at::ScalarType compute_dtype = at::kFloat;
  zero::StateTypes types;
  comm::Team data;                                // all ranks that train on different batches
  bool is_shared = false;                         // the ranks of the host have one copy of the parameters
  bool measures_ratio = false;                    // a start measures the share of states elsewhere, and designs anew
  std::optional<zero::ParameterOffload> offload;  // of shards; absent: they are in the device's memory
  std::optional<tiers::OffloadOptions> states_in_files;  // absent: in memory
  gradients::ReducerOptions reductions;                  // but for what depends on the process
  sharding::ResidencyLimits residency;
  std::vector<UnitRow> units;

  bool on_cpu() const { return model.device.is_cpu(); }
  int num_ranks() const { return data.size(); }
  int64_t num_elements() const;
  /// Whether each rank steps at most its slice of a unit.
  bool steps_shard() const { return policy.shard_optimizer || num_ranks() == 1; }
  std::vector<const UnitRow*> trained() const;

  std::vector<const sharding::UnitLayout*> layouts() const;
  std::vector<const sharding::UnitLayout*> trained_layouts() const;
  /// The sharded ones among them.
  std::vector<const sharding::UnitLayout*> sharded_layouts() const;
  /// The places of the sharded ones.
  std::vector<zero::ShardPlace> shard_places() const;
  /// Trained units as the optimizer sees them.
  std::vector<zero::UnitForecast> stepped() const;
  /// All that is placed of their masters and moments.
  std::vector<zero::StateForecast> states() const;
  /// One for each team and purpose, in one order on all ranks; the first two are of `data`.
  std::vector<ChannelRow> channels() const;
};

/// Returns what an engine of this rank is made of. `facts`: of the model, as read_model says. Allocates nothing.
/// Errors: ConfigError where keys do not go with each other, the rule or the model; ValueError as check_trainable.
Design design(ModelFacts facts, const Config& config, const InitOptions& options, const Topology& topology);
/// The same job under other keys, or on another topology: model, groups and rule stay. Errors: as above.
Design design(const Design& before, const Config& config, const Topology& topology);

}  // namespace deeptide::engine
