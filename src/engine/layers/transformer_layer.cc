// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One layer as an operator of its tensors, which Python's module calls too.
#include "deeptide/transformer_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>
#include <torch/nn/init.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/libraries/format.h"
#include "deeptide/errors.h"
#include "deeptide/ops.h"
#include "deeptide/recompute.h"
#include "ops/dispatched.h"

// Shapes: B batch, S sequence, D hidden, I intermediate, H heads.

namespace deeptide {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Projection {
  const Tensor &weight, &bias;
};

/// The function's value; backward computes what is inside again. A tensor of a transform or a trace has no memory to
/// spare, and runs it as it is.
template <typename Function>
Tensor again_if(bool wanted, Function function, Tensors tensors) {
  constexpr auto kWrapped = c10::python_ks | c10::functorch_transforms_ks;
  if (!wanted || tensors[0].key_set().has_any(kWrapped)) return function(tensors);
  const auto call = [function](const Tensors& inputs) { return Tensors{function(inputs)}; };
  return recompute(call, tensors).at(0);
}

/// Settings of one call: ratios are 0 in evaluation.
struct Call {
  int64_t heads;
  double attention_dropout, hidden_dropout, eps;
  bool pre_norm, invertible, gelu_again, dropout_again, exact_gelu;

  Tensor dropped(const Tensor& x) const { return at::dropout(x, hidden_dropout, hidden_dropout > 0); }

  Tensor norm(const Tensor& x, const Projection& by) const {
    if (invertible) return ops::invertible_layer_norm(x, by.weight, by.bias, eps);
    return ops::layer_norm(x, {x.size(-1)}, by.weight, by.bias, eps);
  }

  /// The norm of dropout(x) + residual, and the sum.
  std::pair<Tensor, Tensor> sum_and_norm(const Tensor& x, const Tensor& residual, const Projection& by) const {
    const Tensor kept = dropped(x);
    if (invertible) {
      const Tensor summed = kept + residual;
      return {norm(summed, by), summed};
    }
    const auto [normed, summed] = ops::residual_layer_norm(kept, residual, {x.size(-1)}, by.weight, by.bias, eps);
    return {normed, summed};
  }

  Tensor attention(const Tensor& x, const std::optional<Tensor>& given, const Projection& qkv_by,
                   const Projection& out_by) const {
    const int64_t batch = x.size(0), length = x.size(1), hidden = x.size(2);
    const Tensor qkv = ops::linear(x, qkv_by.weight, qkv_by.bias).view({batch, length, 3, heads, hidden / heads});
    const auto parts = qkv.permute({2, 0, 3, 1, 4}).unbind(0);
    std::optional<Tensor> mask;
    if (given && given->defined()) mask = given->to(qkv.scalar_type());
    const Tensor context = attention_dropout == 0 ? ops::attention(parts[0], parts[1], parts[2], mask)
                                                  : dropped_attention(parts[0], parts[1], parts[2], mask);
    return ops::linear(context.transpose(1, 2).reshape({batch, length, hidden}), out_by.weight, out_by.bias);
  }

  Tensor dropped_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                           const std::optional<Tensor>& mask) const {
    const Tensor scores = at::matmul(query, key.transpose(-2, -1)) / std::sqrt(static_cast<double>(query.size(-1)));
    const Tensor shares = (mask ? scores + *mask : scores).softmax(-1);
    const auto weigh = [ratio = attention_dropout](const Tensors& of) {
      return at::matmul(at::dropout(of[0], ratio, true), of[1]);
    };
    // A view of the value would keep query and key with it.
    return again_if(dropout_again, weigh, {shares, dropout_again ? value.contiguous() : value});
  }

  Tensor mlp(const Tensor& x, const Projection& inner_by, const Projection& out_by) const {
    const Tensor inner = ops::linear(x, inner_by.weight, inner_by.bias);
    const auto rest = [exact = exact_gelu](const Tensors& of) {
      return ops::linear(exact ? at::gelu(of[0]) : ops::gelu_tanh(of[0]), of[1], of[2]);
    };
    return again_if(gelu_again, rest, {inner, out_by.weight, out_by.bias});
  }
};

/// parameters: in the order of the module's.
Tensor transformer_layer_kernel(const Tensor& x, const std::optional<Tensor>& mask, at::TensorList parameters,
                                int64_t heads, double attention_dropout, double hidden_dropout, double eps,
                                bool pre_norm, bool invertible, bool gelu_again, bool dropout_again, bool exact_gelu) {
  TORCH_CHECK_VALUE(parameters.size() == 12 && x.dim() == 3, "transformer_layer: got ", parameters.size(),
                    " parameters and an input of ", x.dim(), " dimensions, expected 12 and 3");
  const Call call{heads,      attention_dropout, hidden_dropout, eps,       pre_norm,
                  invertible, gelu_again,        dropout_again,  exact_gelu};
  const auto by = [&](size_t number) { return Projection{parameters[2 * number], parameters[2 * number + 1]}; };
  const Projection qkv = by(0), out = by(1), attention_norm = by(2), inner = by(3), output = by(4), norm = by(5);
  if (pre_norm) {
    const Tensor attended = call.attention(call.norm(x, norm), mask, qkv, out);
    const auto [middle, summed] = call.sum_and_norm(attended, x, attention_norm);
    return call.dropped(call.mlp(middle, inner, output)) + summed;
  }
  const Tensor middle = call.sum_and_norm(call.attention(x, mask, qkv, out), x, attention_norm).first;
  return call.sum_and_norm(call.mlp(middle, inner, output), middle, norm).first;
}

}  // namespace

void check(const TransformerLayerOptions& options) {
  const std::pair<const char*, int64_t> sizes[] = {{"hidden_size", options.hidden_size}, {"heads", options.heads}};
  for (const auto& [name, value] : sizes) {
    if (value < 1) throw ConfigError(format_text("transformer layer: {}: got {}, expected 1 or more", name, value));
  }
  if (options.hidden_size % options.heads != 0) {
    throw ConfigError(format_text("transformer layer: heads: {} does not divide hidden_size, {}", options.heads,
                                  options.hidden_size));
  }
  const std::pair<const char*, double> ratios[] = {{"attn_dropout_ratio", options.attn_dropout_ratio},
                                                   {"hidden_dropout_ratio", options.hidden_dropout_ratio}};
  for (const auto& [name, value] : ratios) {
    if (!(value >= 0 && value < 1))
      throw ConfigError(format_text("transformer layer: {}: got {}, expected 0 to below 1", name, value));
  }
  if (!(options.initializer_range >= 0) || (options.adjust_init_range && options.num_hidden_layers < 1)) {
    throw ConfigError(format_text(
        "transformer layer: initializer_range {} and num_hidden_layers {}: expected 0 or more, and 1 or more",
        options.initializer_range, options.num_hidden_layers));
  }
}

TransformerLayerImpl::TransformerLayerImpl(const TransformerLayerOptions& given) : options(given) {
  check(options);
  reset();
}

void TransformerLayerImpl::reset() {
  const int64_t hidden = options.hidden_size;
  const int64_t inner = options.intermediate_size > 0 ? options.intermediate_size : 4 * hidden;
  const auto add = [this](const std::string& name, Tensor& weight, Tensor& bias, std::vector<int64_t> shape) {
    weight = register_parameter(name + "w", at::empty(shape));
    bias = register_parameter(name + "b", at::empty(shape.front()));
  };
  add("attn_qkv", attn_qkvw, attn_qkvb, {3 * hidden, hidden});
  add("attn_o", attn_ow, attn_ob, {hidden, hidden});
  add("attn_n", attn_nw, attn_nb, {hidden});
  add("inter_", inter_w, inter_b, {inner, hidden});
  add("output_", output_w, output_b, {hidden, inner});
  add("norm_", norm_w, norm_b, {hidden});
  reset_parameters();
}

void TransformerLayerImpl::reset_parameters() {
  const double spread = options.initializer_range;
  const double before_sum =
      options.adjust_init_range ? spread / std::sqrt(2.0 * static_cast<double>(options.num_hidden_layers)) : spread;
  torch::nn::init::normal_(attn_qkvw, 0.0, spread);
  torch::nn::init::normal_(attn_ow, 0.0, before_sum);
  torch::nn::init::normal_(inter_w, 0.0, spread);
  torch::nn::init::normal_(output_w, 0.0, before_sum);
  for (const Tensor& weight : {attn_nw, norm_w}) torch::nn::init::ones_(weight);
  for (const Tensor& bias : {attn_qkvb, attn_ob, attn_nb, inter_b, output_b, norm_b}) torch::nn::init::zeros_(bias);
}

Tensor TransformerLayerImpl::forward(const Tensor& hidden_states, const std::optional<Tensor>& attention_mask) {
  static const auto op = ops::dispatched<decltype(transformer_layer_kernel)>("deeptide::transformer_layer");
  const Tensor parameters[] = {attn_qkvw, attn_qkvb, attn_ow,  attn_ob,  attn_nw, attn_nb,
                               inter_w,   inter_b,   output_w, output_b, norm_w,  norm_b};
  return op.call(hidden_states, attention_mask, parameters, options.heads,
                 is_training() ? options.attn_dropout_ratio : 0.0, is_training() ? options.hidden_dropout_ratio : 0.0,
                 options.layer_norm_eps, options.pre_layer_norm, options.normalize_invertible, options.gelu_checkpoint,
                 options.attn_dropout_checkpoint, options.gelu == GeluForm::exact);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def(
      "transformer_layer(Tensor x, Tensor? mask, Tensor[] parameters, int heads, float attention_dropout, "
      "float hidden_dropout, float eps, bool pre_norm, bool invertible, bool gelu_again, bool dropout_again, "
      "bool exact_gelu) -> Tensor",
      transformer_layer_kernel);
}

}  // namespace deeptide
