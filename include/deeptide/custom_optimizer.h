// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// An optimizer that the caller brings: the engine hands it parts of the sharded parameters, and their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/export.h"
#include "deeptide/hyperparameters.h"

namespace deeptide {

/// The part of one parameter that a rank steps: consecutive elements, flattened, or all of it in its shape.
struct ParameterPart {
  std::string parameter;
  int64_t group = 0;  // of the engine's groups
  int64_t begin = 0;  // its first element in the flattened parameter
  at::Tensor values;  // fp32, to be updated in place; (elements,), or the parameter's shape
};

/// One entry of the state that an optimizer keeps of a part.
struct PartState {
  std::string name;          // "exp_avg"
  at::Tensor value;          // per element: as many elements as the part; else of any shape, equal for all its parts
  bool per_element = false;  // one number per element of the part
};

/// Steps parts of parameters. The engine reduces, judges and clips gradients before, and publishes the values after.
class DEEPTIDE_API CustomOptimizer {
 public:
  virtual ~CustomOptimizer();

  /// Its name, and the hyper-parameters of its groups; lives as long as the process (`kept_optimizer_info`).
  virtual const OptimizerInfo& info() const = 0;
  /// Empty if an element's step depends on this element alone; else why a part cannot be stepped without the rest.
  virtual std::string needs_whole() const = 0;
  /// Called once, before the first step: the parts that this rank will step, always in this order.
  virtual void adopt(std::vector<ParameterPart> parts) = 0;
  /// Called before each step: writes into `groups` the hyper-parameters that the program has changed in the optimizer.
  virtual void read_groups(std::vector<Hyperparameters>& groups);
  /// Steps all parts. `gradients`: by part, with its shape, scaled and clipped; undefined where a part stays as it is.
  /// `groups`: the hyper-parameters in force.
  virtual void step(const std::vector<at::Tensor>& gradients, const std::vector<Hyperparameters>& groups) = 0;
  /// The state of a part; empty before its first step. Errors: ValueError naming an entry that cannot be saved.
  virtual std::vector<PartState> state(size_t part) = 0;
  /// Replaces the state of a part.
  virtual void set_state(size_t part, std::vector<PartState> state) = 0;
};

}  // namespace deeptide
