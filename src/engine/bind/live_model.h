// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The model as it is now, beside what was bound at initialize.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/engine.h"
#include "engine/bind/bound_model.h"

namespace deeptide::engine {

/// The parts that an engine was made of, so that it can be made again.
struct Origin {
  Origin(ModelDescription description, const InitOptions& options)
      : model(std::move(description)), optimizer(options.optimizer), axes(options.axes) {
    model.buffers.clear();  // the program may have let go of them
    model.transient_buffers.clear();
  }

  ModelDescription model;
  std::optional<std::string> optimizer;  // as in InitOptions
  std::shared_ptr<const Axes> axes;      // likewise
};

/// A name that held another tensor at initialize, or none, and holds that of a bound parameter now.
struct LateTie {
  std::string name;
  BoundName to;
};

/// Tensors of a checkpoint or an export that come from the program's model instead of the engine's units.
struct LooseTensors {
  std::vector<NamedTensor> buffers;
  /// Parameters that the engine does not train: whose names hold other tensors than at initialize, or are new.
  std::vector<NamedTensor> replaced, added;
  /// Names whose values are those of parameters that the engine has.
  std::vector<LateTie> tied;

  /// Without `tied`.
  std::vector<NamedTensor> all() const;
  /// The terms that all ranks must have alike, a line each: ties, replacements, and tensors that only all ranks can
  /// read.
  std::vector<std::string> terms() const;
};

/// The names under which the model has each bound parameter now: those that still hold it, and late ties.
class LiveNames {
 public:
  explicit LiveNames(const LooseTensors& loose);
  std::vector<sharding::Alias> of(const sharding::Parameter& p) const;

 private:
  std::set<std::string> elsewhere_;  // names that hold something else
  std::multimap<const sharding::Parameter*, sharding::Alias> ties_;
};

/// Modules rebind buffers (`self.mean = 0.9 * self.mean + …`) and replace parameters (`self.weight = Parameter(…)`):
/// the tensors that initialize saw are then not those that forward uses.
class LiveModel {
 public:
  using Describe = std::function<ModelDescription()>;
  using Buffers = std::function<std::vector<NamedTensor>()>;

  /// `bound` outlives this. Without `describe` the model stays what `first` says. `buffers`: as in InitOptions.
  LiveModel(const BoundModel& bound, ModelDescription first, Describe describe, Buffers buffers);

  /// The buffers that checkpoints hold, as the model has them; without `buffers` as it had them at the last look.
  std::vector<NamedTensor> buffers() const { return buffers_ ? buffers_() : seen_buffers_; }
  /// Whether that is so however the program rebinds them.
  bool knows_buffers() const { return buffers_ != nullptr; }
  /// Looks at the model. Warns once about each replaced parameter.
  LooseTensors look();
  /// The program may have changed the model: the next check looks at it.
  void expect_changes() { stale_ = true; }
  /// Errors: ValueError naming a parameter that backward gave a gradient though this engine does not have it.
  void check_trained();

 private:
  void tell(const std::string& name, const std::string& what);

  const BoundModel& bound_;
  Describe describe_;
  Buffers buffers_;
  std::vector<NamedTensor> seen_buffers_;
  std::set<std::string> told_;        // names of parameters warned about
  std::vector<NamedTensor> foreign_;  // parameters that the engine does not have, at the last look
  std::atomic<bool> stale_{false};
};

}  // namespace deeptide::engine
