// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Values and random draws some elements at a time, so that no memory of a whole tensor is needed.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "deferred/history.h"

namespace deeptide::deferred {

/// Makes a contiguous deferred tensor's values from its first element to its last; the tensor stays deferred.
class Parts {
 public:
  /// torch draws normal numbers by so many: a part has a multiple, or is the last.
  static constexpr int64_t kMultiple = 16;

  /// Nothing if an operator of the tensor's history needs more of it than the elements that it writes.
  static std::optional<Parts> of(const at::Tensor& tensor);

  /// The next `count` elements, one-dimensional, in memory of their own.
  at::Tensor next(int64_t count);

  struct Step {
    const Operation* operation = nullptr;
    int64_t begin = 0, count = 0;  // elements that it writes
    at::Generator generator;       // where it draws
  };

 private:
  std::shared_ptr<Version> version_;  // keeps the operations
  std::vector<Step> steps_;
  int64_t position_ = 0;
};

/// Draws what the operator would from its generator now, by parts. Returns false if it has to draw at once.
bool draw_in_parts(const Operation& operation);

}  // namespace deeptide::deferred
