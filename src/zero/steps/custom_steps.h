// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts the masters into parts for an optimizer that the caller brings, and finds its states by parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/custom_optimizer.h"
#include "device/memory/memory.h"
#include "zero/states/optimizer_states.h"
#include "zero/states/step_counts.h"

namespace deeptide::zero {

class CustomSteps {
 public:
  /// The place of one part. Units: elements.
  struct Part {
    int unit = 0;       // by position
    int parameter = 0;  // in the unit
    int64_t begin = 0;  // in the unit
    int64_t end = 0;
  };

  /// Hands the parts over. Parts end where shards end, also where a rank has all: what torch's kernels make of an
  /// element may depend on its distance from the tensor's end, and stages must agree.
  /// Errors: ValueError if the optimizer needs whole parameters and this rank has shards, or if masters do not lie in
  /// memory. `gradients_leave`: for the host, which steps what a device trains; else there is memory for them, counted
  /// in `ledger`.
  CustomSteps(const OptimizerStates& states, CustomOptimizer& optimizer, bool gradients_leave,
              const std::shared_ptr<device::Ledger>& ledger);

  /// `gradients`: by unit, over its states, scaled; undefined for a unit without an active parameter.
  void step(const std::vector<at::Tensor>& gradients, const std::vector<Hyperparameters>& groups,
            const ActiveParameters& active);

  /// A unit's gradient where its master lies, on the host in memory that the next one overwrites: to hand to `step`.
  at::Tensor beside_master(int unit, const at::Tensor& gradient) const;
  int64_t host_gradient_bytes() const;

  CustomOptimizer& optimizer() const { return optimizer_; }
  const std::vector<Part>& parts() const { return parts_; }
  const sharding::Parameter& parameter(const Part& part) const;

  /// A state per element of one parameter, within the unit's states (N,) fp32; zeros elsewhere. Undefined: no part of
  /// the parameter on this rank has it.
  at::Tensor state(int unit, int parameter, const std::string& name) const;
  /// Overwrites the elements of such a state from `first`, in the unit, on.
  void write(int unit, int parameter, const std::string& name, int64_t first, const at::Tensor& values);
  /// The names of one parameter's states per element.
  std::vector<std::string> names(int unit, int parameter) const;

 private:
  at::Tensor in_shape(const Part& part, const at::Tensor& flat) const;

  const OptimizerStates& states_;
  CustomOptimizer& optimizer_;
  bool whole_ = false;
  std::vector<Part> parts_;
  std::vector<at::Tensor> host_gradients_;  // by unit; none unless masters lie on a device's host
};

}  // namespace deeptide::zero
