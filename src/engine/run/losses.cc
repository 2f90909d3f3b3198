// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads losses where somebody asks for them.
#include "engine/run/losses.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>

#include <cmath>
#include <utility>

#include "base/libraries/format.h"
#include "deeptide/errors.h"

namespace deeptide::engine {

double Losses::mean() const {
  double sum = 0.0;
  for (const at::Tensor& loss : since_) sum += loss.item().toDouble();
  return since_.empty() ? kNoLoss : sum / static_cast<double>(since_.size());
}

bool Losses::are_finite() const {
  std::vector<at::Tensor> losses;
  for (const at::Tensor& loss : since_) {
    losses.push_back(loss.to(since_.front().device(), at::kDouble).reshape({1}));
  }
  return losses.empty() || at::isfinite(at::cat(losses)).all().item<bool>();
}

void Losses::check_first(double tolerance) {
  const double expected = std::exchange(expected_, kNoLoss);
  if (std::isnan(expected)) return;  // to read a loss is to wait for the device
  const double loss = mean();
  if (std::isnan(loss) || std::abs(loss - expected) <= tolerance * std::abs(expected)) return;
  throw CheckpointError(
      format_text("step: the first loss after load_checkpoint is {:g}, the last one before the save was {:g}, and "
                  "checkpoint.loss_tolerance allows a difference of {:g} of it. Check that model, data and "
                  "configuration are those of the run that saved, or call step() again to go on",
                  loss, expected, tolerance));
}

}  // namespace deeptide::engine
