// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Brings the whole model to the first rank, tensor by tensor: parts of shards, slices and stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace deeptide::engine {

/// A tensor of the whole model, as the stage that has it lists it.
struct Listed {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> shape;
};

/// Takes the whole model, on the first rank.
struct ModelTaker {
  /// Is told of all tensors, the first stage's first. Errors: CheckpointError, on all ranks.
  std::function<void(const std::vector<Listed>&)> begin;
  /// Is given each of them in that order. It does not throw, and copies what it keeps.
  std::function<void(const std::string& name, const at::Tensor& values)> take;
};

}  // namespace deeptide::engine
