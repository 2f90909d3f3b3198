// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A copy of the model that training does not touch.
#pragma once

#include <memory>

#include "deeptide/export.h"

namespace torch::nn {
class Module;
}

namespace deeptide {

/// Returns a deep copy of `model` as it is now, whole, in memory of its own: in eval mode, without gradients. For a
/// thread that evaluates or saves it while training goes on. Collective at stage 3. Errors: ValueError for a class
/// without clone(), which torch::nn::Cloneable gives.
DEEPTIDE_API std::shared_ptr<torch::nn::Module> snapshot(const torch::nn::Module& model);

}  // namespace deeptide
