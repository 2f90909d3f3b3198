// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loops over the micro-batches of a step. Losses are added on their device: the host waits once.
#include "deeptide/batches.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace deeptide {
namespace {

class MeanLoss {
 public:
  void add(const at::Tensor& loss) {
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "the loss of a micro-batch: got ",
                      loss.defined() ? loss.numel() : 0, " elements, expected a scalar");
    const at::Tensor value = loss.detach().to(at::kDouble).reshape({});
    sum_ = sum_.defined() ? sum_ + value : value;
    ++count_;
  }
  double over_ranks(Engine& engine) const { return engine.mean(sum_.item<double>() / static_cast<double>(count_)); }

 private:
  at::Tensor sum_;
  int64_t count_ = 0;
};

}  // namespace

BatchOutcome train_batch(Engine& engine, const NextLoss& next) {
  TORCH_CHECK_VALUE(!engine.has_gradients(),
                    "train_batch: there are gradients already; call step() for them, or zero_grad()");
  MeanLoss mean;
  BatchOutcome outcome;
  for (int64_t left = engine.batch_sizes().accumulation; left > 0; --left) {
    const at::Tensor loss = next();
    mean.add(loss);
    engine.backward(loss);
    outcome.step = engine.step();
  }
  outcome.loss = mean.over_ranks(engine);
  return outcome;
}

double eval_batch(Engine& engine, const NextLoss& next, int64_t micro_batches) {
  at::NoGradGuard no_grad;
  MeanLoss mean;
  for (int64_t left = micro_batches > 0 ? micro_batches : engine.batch_sizes().accumulation; left > 0; --left) {
    mean.add(next());
  }
  return mean.over_ranks(engine);
}

}  // namespace deeptide
