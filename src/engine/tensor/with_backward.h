// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A step of a computation whose gradient is another function, as exchanges between ranks are.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace deeptide::engine {

using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

/// Returns forward(input), a new tensor or an alias. `backward` gives the gradient of the input from that of the
/// result; both run without a graph, and there is no second derivative.
at::Tensor with_backward(const at::Tensor& input, const TensorFunction& forward, TensorFunction backward);

/// Errors: RuntimeError in a backward that makes a graph.
void refuse_second_derivative();

}  // namespace deeptide::engine
