// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of logits, or of hidden states and weights: checks, chunks, and gradients computed in forward.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>

#include "deeptide/ops.h"
#include "ops/dispatched.h"
#include "ops/fast_path.h"
#include "ops/kernels.h"
#include "ops/matmul.h"

// Shapes: N rows, V classes, D width of the hidden state.

namespace deeptide::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

/// Bytes of a chunk of logits: the caches decide on the CPU. A device wants few launches and large products.
int64_t chunk_bytes(const Tensor& hidden_ND) { return int64_t{hidden_ND.is_cpu() ? 32 : 256} << 20; }

struct Settings {
  int64_t ignore_index;
  int64_t reduction;
  double label_smoothing;
};

void check(const char* what, const Tensor& rows, const char* rows_name, const Tensor& targets_N,
           const Settings& settings) {
  TORCH_CHECK_VALUE(rows.dim() == 2, what, ": ", rows_name, " has shape ", rows.sizes(),
                    ", expected two dimensions, one row per target; flatten the others first");
  TORCH_CHECK_VALUE(targets_N.dim() == 1 && targets_N.size(0) == rows.size(0), what, ": targets have shape ",
                    targets_N.sizes(), ", expected [", rows.size(0), "], one per row of ", rows_name);
  TORCH_CHECK_VALUE(targets_N.scalar_type() == at::kLong, what, ": targets are ", targets_N.scalar_type(),
                    ", expected Long; class probabilities are torch's cross_entropy only");
  TORCH_CHECK_VALUE(settings.label_smoothing >= 0.0 && settings.label_smoothing <= 1.0, what, ": label_smoothing is ",
                    settings.label_smoothing, ", expected 0 to 1");
  TORCH_CHECK_VALUE(settings.reduction >= at::Reduction::None && settings.reduction < at::Reduction::END, what,
                    ": reduction is ", settings.reduction, ", expected at::Reduction's None, Mean or Sum");
}

/// Counts the targets that are not ignored.
int64_t count_targets(const char* what, const Tensor& targets_N, int64_t classes, int64_t ignore_index) {
  const int64_t* targets = targets_N.const_data_ptr<int64_t>();
  int64_t count = 0;
  for (int64_t n = 0; n < targets_N.numel(); ++n) {
    if (targets[n] == ignore_index) continue;
    TORCH_CHECK_INDEX(targets[n] >= 0 && targets[n] < classes, what, ": target ", targets[n], " of row ", n,
                      " is not a class, expected 0 to ", classes - 1, " or ignore_index (", ignore_index, ")");
    ++count;
  }
  return count;
}

double scale_of(const Settings& settings, int64_t count) {
  return settings.reduction == at::Reduction::Mean && count > 0 ? 1.0 / static_cast<double>(count) : 1.0;
}

/// A mean over no targets is NaN, as torch's is.
Tensor reduce(const Tensor& losses_N, const Settings& settings, int64_t count) {
  if (settings.reduction == at::Reduction::None) return losses_N;
  const Tensor sum = losses_N.sum();
  return settings.reduction == at::Reduction::Sum ? sum : sum / count;
}

/// Returns `known` times the gradient of the loss; most often that is 1, and nothing needs doing. A device's is not
/// read.
Tensor scaled(const Tensor& known, const Tensor& gradient) {
  if (!known.defined()) return known;
  if (gradient.is_cpu() && gradient.numel() == 1 && gradient.item<double>() == 1.0) return known;
  return known * (gradient.dim() == 1 ? gradient.unsqueeze(1) : gradient).to(known.scalar_type());
}

void check_first_derivative(const char* what) {
  TORCH_CHECK(!at::GradMode::is_enabled(), what,
              ": got create_graph=True, but this operator's gradient is known after forward and has none of its own. "
              "Use torch's cross_entropy, or double, for second derivatives.");
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Tensor forward(AutogradContext* context, const Tensor& logits, const Tensor& targets_N, int64_t ignore_index,
                        int64_t reduction, double label_smoothing, bool with_gradient) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Settings settings{ignore_index, reduction, label_smoothing};
    const Tensor logits_NV = logits.contiguous(), targets = targets_N.contiguous();
    const int64_t count = count_targets("cross_entropy", targets, logits_NV.size(1), ignore_index);
    const Tensor losses_N = at::empty({logits_NV.size(0)}, logits_NV.options().dtype(at::kFloat));
    const Tensor gradient_NV = with_gradient ? at::empty_like(logits_NV) : Tensor();
    cross_entropy_cpu(logits_NV, targets, {ignore_index, label_smoothing, scale_of(settings, count)}, losses_N,
                      gradient_NV);
    if (with_gradient) context->save_for_backward({gradient_NV});
    return reduce(losses_N, settings, count);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    check_first_derivative("cross_entropy");
    variable_list results(6);
    if (gradients[0].defined()) results[0] = scaled(context->get_saved_variables()[0], gradients[0]);
    return results;
  }
};

struct HiddenGradients {
  Tensor hidden_ND, weight_VD, bias_V;

  bool any() const { return hidden_ND.defined() || weight_VD.defined() || bias_V.defined(); }
};

struct Head {
  Tensor weight_VD;
  std::optional<Tensor> bias_V;
};

/// The settings of rows, and a factor of their gradient that only the device knows; undefined: none.
struct RowSettings {
  CrossEntropyTerms terms;
  Tensor scale;
};

void row_losses(const Tensor& logits_NV, const Tensor& targets_N, const RowSettings& rows, const Tensor& losses_N,
                const Tensor& gradient_NV) {
  if (logits_NV.is_cpu()) return cross_entropy_cpu(logits_NV, targets_N, rows.terms, losses_N, gradient_NV);
  cross_entropy_rows(logits_NV, targets_N, rows.terms, rows.scale, losses_N, gradient_NV);
}

/// Computes the losses of all rows, chunk by chunk; each chunk's gradient replaces its logits.
void chunked_losses(const Tensor& hidden_ND, const Head& head, const Tensor& targets_N, const RowSettings& settings,
                    const Tensor& losses_N, HiddenGradients* wanted) {
  const Tensor& weight_VD = head.weight_VD;
  const int64_t rows = hidden_ND.size(0);
  const int64_t row_bytes = weight_VD.size(0) * static_cast<int64_t>(hidden_ND.element_size());
  const int64_t chunk = std::max<int64_t>(1, chunk_bytes(hidden_ND) / std::max<int64_t>(1, row_bytes));
  const bool several = rows > chunk;
  Tensor weight_sum, bias_sum;  // in fp32, because otherwise each chunk would round
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = std::min(chunk, rows - first);
    const Tensor part_CD = hidden_ND.narrow(0, first, count);
    const Tensor logits_CV = product_nt(part_CD, weight_VD, head.bias_V).contiguous();
    row_losses(logits_CV, targets_N.narrow(0, first, count), settings, losses_N.narrow(0, first, count),
               wanted->any() ? logits_CV : Tensor());
    if (wanted->hidden_ND.defined()) {
      wanted->hidden_ND.narrow(0, first, count).copy_(product_nt(logits_CV, weight_VD.t()));
    }
    if (wanted->bias_V.defined()) {
      const Tensor sum_V = logits_CV.sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat);
      bias_sum = bias_sum.defined() ? bias_sum.add_(sum_V) : sum_V;
    }
    if (!wanted->weight_VD.defined()) continue;
    Tensor product_VD = product_nt(logits_CV.t(), part_CD.t());
    if (weight_sum.defined()) {
      weight_sum.add_(product_VD);
    } else {
      weight_sum = several ? product_VD.to(at::kFloat) : product_VD;
    }
  }
  if (weight_sum.defined()) wanted->weight_VD = weight_sum.to(weight_VD.scalar_type());
  if (bias_sum.defined()) wanted->bias_V = bias_sum.to(head.bias_V->scalar_type());
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight_VD,
                        const std::optional<Tensor>& bias_V, const Tensor& targets_N, int64_t ignore_index,
                        int64_t reduction, double label_smoothing, std::array<bool, 3> with_gradients) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Settings settings{ignore_index, reduction, label_smoothing};
    const Tensor hidden_ND = hidden.contiguous(), targets = targets_N.contiguous();
    const bool on_host = hidden_ND.is_cpu();
    const int64_t count = on_host ? count_targets("linear_cross_entropy", targets, weight_VD.size(0), ignore_index) : 0;
    RowSettings rows{{ignore_index, label_smoothing, on_host ? scale_of(settings, count) : 1.0}, {}};
    if (!on_host && reduction == at::Reduction::Mean)
      rows.scale = targets.ne(ignore_index).sum().to(at::kFloat).reciprocal();
    const Tensor losses_N = at::empty({hidden_ND.size(0)}, hidden_ND.options().dtype(at::kFloat));
    HiddenGradients known;  // those that no row adds to stay zero
    if (with_gradients[0]) known.hidden_ND = at::empty_like(hidden_ND);
    const bool none = hidden_ND.size(0) == 0;
    if (with_gradients[1])
      known.weight_VD = at::zeros(none ? weight_VD.sizes() : at::IntArrayRef{0}, weight_VD.options());
    if (with_gradients[2]) known.bias_V = at::zeros(bias_V->sizes(), bias_V->options());
    chunked_losses(hidden_ND, {weight_VD, bias_V}, targets, rows, losses_N, &known);
    context->save_for_backward({known.hidden_ND, known.weight_VD, known.bias_V});
    return rows.scale.defined() ? losses_N.sum() * rows.scale : reduce(losses_N, settings, count);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    check_first_derivative("linear_cross_entropy");
    variable_list results(8);
    if (!gradients[0].defined()) return results;
    const auto known = context->get_saved_variables();
    for (size_t index = 0; index < known.size(); ++index) results[index] = scaled(known[index], gradients[0]);
    return results;
  }
};

bool needs_gradient(const Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

struct CountedRows {
  Tensor hidden_MD, targets_M;
};

/// The rows that are not ignored: the head multiplies no others, in either direction. All rows, where targets are not
/// to be read.
CountedRows counted_rows(const Tensor& hidden_ND, const Tensor& targets_N, int64_t classes, int64_t ignore_index) {
  if (!readable(targets_N) || !readable(hidden_ND)) return {hidden_ND, targets_N};
  const int64_t count = count_targets("linear_cross_entropy", targets_N.contiguous(), classes, ignore_index);
  if (count == targets_N.size(0)) return {hidden_ND, targets_N};
  const Tensor rows_M = targets_N.ne(ignore_index).nonzero().squeeze(1);
  return {hidden_ND.index_select(0, rows_M), targets_N.index_select(0, rows_M)};
}

}  // namespace

Tensor cross_entropy_kernel(const Tensor& logits, const Tensor& targets, int64_t ignore_index, int64_t reduction,
                            double label_smoothing) {
  check("cross_entropy", logits, "logits", targets, {ignore_index, reduction, label_smoothing});
  if (!fast_path(logits) || !targets.is_cpu()) {
    return cross_entropy_reference(logits, targets, ignore_index, reduction, label_smoothing);
  }
  return CrossEntropy::apply(logits, targets, ignore_index, reduction, label_smoothing, needs_gradient(logits));
}

Tensor linear_cross_entropy_kernel(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                   int64_t ignore_index, int64_t reduction, double label_smoothing,
                                   const std::optional<Tensor>& bias) {
  const char* what = "linear_cross_entropy";
  check(what, hidden, "hidden", targets, {ignore_index, reduction, label_smoothing});
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == hidden.size(1), what, ": weight has shape ", weight.sizes(),
                    ", expected [classes, ", hidden.size(1), "] as hidden has shape ", hidden.sizes());
  const bool has_bias = bias && bias->defined();
  TORCH_CHECK_VALUE(!has_bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), what, ": bias has shape ",
                    has_bias ? bias->sizes() : at::IntArrayRef{}, ", expected [", weight.size(0),
                    "], one per row of weight");
  TORCH_CHECK_VALUE(reduction != at::Reduction::None, what,
                    ": reduction is None, expected Mean or Sum; for a loss per "
                    "row use cross_entropy(linear(hidden, weight), targets)");
  const CountedRows rows = counted_rows(hidden, targets, weight.size(0), ignore_index);
  const auto fits = [&](const Tensor& tensor) {
    return plain_float(tensor) && tensor.device() == hidden.device() && tensor.scalar_type() == hidden.scalar_type();
  };
  const bool fast = fits(hidden) && fits(weight) && (!has_bias || fits(*bias)) && plain(targets) &&
                    targets.device() == hidden.device();
  if (!fast) {
    return cross_entropy_reference(at::linear(rows.hidden_MD, weight, bias), rows.targets_M, ignore_index, reduction,
                                   label_smoothing);
  }
  const std::array<bool, 3> wanted{needs_gradient(hidden), needs_gradient(weight), has_bias && needs_gradient(*bias)};
  return LinearCrossEntropy::apply(rows.hidden_MD, weight, has_bias ? bias : std::nullopt, rows.targets_M, ignore_index,
                                   reduction, label_smoothing, wanted);
}

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index, int64_t reduction,
                     double label_smoothing) {
  static const auto op = dispatched<decltype(cross_entropy_kernel)>("deeptide::cross_entropy");
  return op.call(logits, targets, ignore_index, reduction, label_smoothing);
}

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
                            int64_t reduction, double label_smoothing, const std::optional<Tensor>& bias) {
  static const auto op = dispatched<decltype(linear_cross_entropy_kernel)>("deeptide::linear_cross_entropy");
  return op.call(hidden, weight, targets, ignore_index, reduction, label_smoothing, bias);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def(
      "cross_entropy(Tensor logits, Tensor targets, int ignore_index=-100, int reduction=1, float label_smoothing=0.0) "
      "-> Tensor",
      cross_entropy_kernel);
  library.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index=-100, int reduction=1, "
      "float label_smoothing=0.0, Tensor? bias=None) -> Tensor",
      linear_cross_entropy_kernel);
}

}  // namespace deeptide::ops
