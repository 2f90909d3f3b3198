// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each rank tells three numbers for each row: its largest logit, its sum of exponentials, and the wanted word's logit.
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "deeptide/tensor_layers.h"
#include "engine/tensor/with_backward.h"

namespace deeptide {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

namespace {

struct Rows {
  Tensor losses;         // (N,)
  Tensor probabilities;  // (N, V / ranks)
  Tensor index;          // (N, 1) of the wanted word, where it is this rank's
  Tensor is_here;        // (N, 1), fp32
};

/// Shapes: logits (N, V / ranks), labels (N,), none ignored. `vocabulary`: what is beyond is padding.
Rows rows_of(const Tensor& logits, const Tensor& labels, int64_t vocabulary, TensorTeam& team) {
  const int64_t part = logits.size(1), begin = team.index() * part;
  Tensor x = logits.to(at::kFloat);
  if (begin + part > vocabulary) {
    x = x.masked_fill(at::arange(part) >= vocabulary - begin, -std::numeric_limits<double>::infinity());
  }
  const Tensor local = (labels - begin).unsqueeze(1);
  const Tensor is_here = local.ge(0).logical_and(local.lt(part));
  Rows rows{.index = local.masked_fill(is_here.logical_not(), 0), .is_here = is_here.to(at::kFloat)};
  const Tensor most = x.amax(1).clamp_min(std::numeric_limits<float>::lowest());
  rows.probabilities = (x - most.unsqueeze(1)).exp_();
  const Tensor wanted = x.gather(1, rows.index).squeeze(1).masked_fill(is_here.squeeze(1).logical_not(), 0.0);
  const Tensor told = team.all_gather(at::stack({most, rows.probabilities.sum(1), wanted}), "forward");
  const Tensor of_all = told.select(1, 0), top = of_all.amax(0);
  const Tensor total = (told.select(1, 1) * (of_all - top).exp()).sum(0);
  rows.probabilities.mul_(((most - top).exp() / total).unsqueeze(1));
  rows.losses = total.log() + top - told.select(1, 2).sum(0);
  return rows;
}

struct Losses : torch::autograd::Function<Losses> {
  static Tensor forward(AutogradContext* context, const Tensor& logits, const Tensor& labels, int64_t vocabulary,
                        const TensorTeamPtr& team) {
    Rows rows = rows_of(logits, labels, vocabulary, *team);
    context->save_for_backward({rows.probabilities, rows.index, rows.is_here});
    context->saved_data["type"] = logits.scalar_type();
    return rows.losses;
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    engine::refuse_second_derivative();
    const auto saved = context->get_saved_variables();
    const Tensor result = saved[0].scatter_add(1, saved[1], saved[2].neg());
    return {(result * gradients[0].unsqueeze(1)).to(context->saved_data["type"].toScalarType()), {}, {}, {}};
  }
};

}  // namespace

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& labels, const TensorTeamPtr& team,
                                    const VocabParallelLossOptions& options) {
  const Tensor flat = labels.reshape({-1}), is_ignored = flat.eq(options.ignore_index);
  const int64_t vocabulary = options.vocabulary.value_or(logits.size(-1) * team->size());
  const Tensor losses =
      Losses::apply(logits.reshape({-1, logits.size(-1)}), flat.masked_fill(is_ignored, 0), vocabulary, team)
          .masked_fill(is_ignored, 0.0);
  if (options.reduction == at::Reduction::None) return losses.view(labels.sizes());
  if (options.reduction == at::Reduction::Sum) return losses.sum();
  return losses.sum() / is_ignored.logical_not().sum();
}

}  // namespace deeptide
