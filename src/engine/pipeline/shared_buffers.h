// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buffers of one module on several stages: each stage has its own, so what a forward writes there would part.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "deeptide/pipeline.h"

namespace deeptide::engine {

/// Those of one stage. Constants, such as tables of positions, may be shared; running statistics may not.
class SharedBuffers {
 public:
  /// `model` outlives it.
  explicit SharedBuffers(const PipelineModule& model) : model_(model) {}

  /// Before a forward of this stage: keeps the values. Costs nothing where no shared module has buffers.
  void keep();
  /// After it. Errors: ValueError naming a buffer that the forward has written. Values are compared: an operator may
  /// write without telling autograd, as batch_norm does.
  void check() const;

 private:
  struct Kept {
    std::string name;
    at::Tensor buffer, value;
    std::vector<int> stages;
  };
  const PipelineModule& model_;
  std::vector<Kept> kept_;
};

}  // namespace deeptide::engine
