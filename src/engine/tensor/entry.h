// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The way of activations into layers that ranks share, and of the sum of their gradients out of them.
#pragma once

#include <ATen/core/Tensor.h>

namespace deeptide::engine {

/// entered: by enter_team. Its gradient's sum is begun before the gradients of the weights and ended after them, by the
/// numbers of autograd's nodes. Shapes: (*, in), (out, in), (out) or undefined -> (*, out).
at::Tensor product_of(const at::Tensor& entered, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace deeptide::engine
