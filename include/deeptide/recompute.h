// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: what backward needs is computed again instead of kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "deeptide/config.h"

namespace deeptide {

/// Returns forward(inputs), of which nothing but the inputs is kept; backward computes it once more (arXiv:1604.06174).
/// Both times it draws the same random numbers and runs under the same autocast. Gradients reach the inputs and all
/// parameters that `forward` uses, also where no input has a gradient; segments nest. Without gradients it is
/// forward(inputs). `forward` is kept until backward: let it own what it uses. A buffer that it writes, such as a batch
/// norm's running statistics, is written twice, as by torch.utils.checkpoint.
/// Errors in backward: RuntimeError where an input was written in place since, where `forward` returns another number
/// of tensors than before, and with create_graph. torch::autograd::grad reaches the inputs alone.
DEEPTIDE_API std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> forward,
    const std::vector<at::Tensor>& inputs);

}  // namespace deeptide
