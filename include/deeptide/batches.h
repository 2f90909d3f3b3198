// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A whole step, or an evaluation over several micro-batches, in one call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "deeptide/engine.h"

namespace deeptide {

/// Runs the model on the next micro-batch. Returns its loss, a scalar.
using NextLoss = std::function<at::Tensor()>;

struct BatchOutcome {
  double loss = 0.0;  // mean over micro-batches and ranks, the same on every rank
  StepOutcome step;
};

/// Collective. Runs forward, backward and step() for as many micro-batches as one optimizer step takes. Errors:
/// ValueError if there are gradients already, or a loss is not a scalar; otherwise as Engine::backward and step.
DEEPTIDE_API BatchOutcome train_batch(Engine& engine, const NextLoss& next);

/// Collective. Returns the mean loss over micro-batches and ranks, and makes no gradients. `micro_batches`: 0: as many
/// as train_batch takes. The model's mode is the caller's.
DEEPTIDE_API double eval_batch(Engine& engine, const NextLoss& next, int64_t micro_batches = 0);

}  // namespace deeptide
