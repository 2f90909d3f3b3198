// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One formula for each operator that multiplies.
#include "report/flops/operator_macs.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <unordered_map>

namespace deeptide::report {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;
using Macs = int64_t (*)(Inputs);

c10::IntArrayRef sizes(Inputs inputs, size_t at) {
  if (at >= inputs.size() || !inputs[at].isTensor() || !inputs[at].toTensor().defined()) return {};
  return inputs[at].toTensor().sizes();
}

int64_t product(c10::IntArrayRef dimensions) {
  int64_t all = 1;
  for (const int64_t dimension : dimensions) all *= dimension;
  return all;
}

/// Products of (…, m, k) by (…, k, n): every element of the first meets n of the second.
template <size_t First>
int64_t matrix_product(Inputs inputs) {
  const auto a = sizes(inputs, First), b = sizes(inputs, First + 1);
  return a.empty() || b.empty() ? 0 : product(a) * (b.size() > 1 ? b.back() : 1);
}

/// Products of (N, C, …) by a weight (O, C / groups, …): every output meets one filter.
int64_t convolution_macs(c10::IntArrayRef weight, c10::IntArrayRef spatial, int64_t batch) {
  return batch * product(spatial) * product(weight);
}

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
int64_t convolution(Inputs inputs) {
  const auto input = sizes(inputs, 0), weight = sizes(inputs, 1);
  if (input.size() < 3 || inputs.size() < 9) return 0;
  const auto stride = inputs[3].toIntVector(), padding = inputs[4].toIntVector(), dilation = inputs[5].toIntVector();
  if (inputs[6].toBool()) return convolution_macs(weight, input.slice(2), input[0]);
  std::vector<int64_t> output;
  for (size_t i = 2; i < input.size(); ++i) {
    const auto pick = [&](const std::vector<int64_t>& v) { return v.size() > 1 ? v.at(i - 2) : v.at(0); };
    const int64_t reach = pick(dilation) * (weight[i] - 1) + 1;
    output.push_back((input[i] + 2 * pick(padding) - reach) / pick(stride) + 1);
  }
  return convolution_macs(weight, output, input[0]);
}

/// convolution_backward(grad_output, input, weight, bias_sizes, …, transposed, output_padding, groups, output_mask):
/// as many products for the input's gradient as for the weight's.
int64_t convolution_backward(Inputs inputs) {
  const auto gradient = sizes(inputs, 0), input = sizes(inputs, 1), weight = sizes(inputs, 2);
  if (gradient.size() < 3 || inputs.size() < 11) return 0;
  const bool transposed = inputs[7].toBool();
  const int64_t once = convolution_macs(weight, transposed ? input.slice(2) : gradient.slice(2), input[0]);
  const auto mask = inputs[10].toBoolList();
  return once * (static_cast<int64_t>(mask.get(0)) + static_cast<int64_t>(mask.get(1)));
}

/// conv_tbc(input (T, B, C), weight (K, C, O), bias, pad)
int64_t convolution_tbc(Inputs inputs) {
  const auto input = sizes(inputs, 0), weight = sizes(inputs, 1);
  if (input.size() != 3 || weight.size() != 3 || inputs.size() < 4) return 0;
  return (input[0] + 2 * inputs[3].toInt() - weight[0] + 1) * input[1] * product(weight);
}

/// conv_tbc_backward(gradient (T, B, O), input, weight, …): for the input and for the weight.
int64_t convolution_tbc_backward(Inputs inputs) {
  const auto gradient = sizes(inputs, 0), weight = sizes(inputs, 2);
  return gradient.size() == 3 ? 2 * gradient[0] * gradient[1] * product(weight) : 0;
}

/// One layer and direction of an LSTM, GRU or RNN in one operator: mkldnn_rnn_layer(input (T, N, I), weight of the
/// input, weight of the state, …). Backward makes as many products for inputs as for weights.
template <int Times>
int64_t recurrent_layer(Inputs inputs) {
  const auto input = sizes(inputs, 0);
  return input.size() == 3 ? Times * input[0] * input[1] * (product(sizes(inputs, 1)) + product(sizes(inputs, 2))) : 0;
}

/// Attention of queries (B, H, L, E), keys (B, H', S, E) and values (B, H', S, V), masked elements included: B H L S
/// times E for scores and V for sums.
template <size_t First, int Scores, int Sums>
int64_t attention(Inputs inputs) {
  const auto q = sizes(inputs, First), k = sizes(inputs, First + 1), v = sizes(inputs, First + 2);
  if (q.size() != 4 || k.size() != 4 || v.size() != 4) return 0;
  return q[0] * q[1] * q[2] * k[2] * (Scores * q[3] + Sums * v[3]);
}

/// _grouped_mm(a (T, k), b (E, k, n), offsets): each row of `a` meets one of `b`'s matrices.
int64_t grouped_product(Inputs inputs) {
  const auto a = sizes(inputs, 0), b = sizes(inputs, 1);
  if (a.size() == 2 && b.size() == 2) return a[0] * a[1] * b[1];  // (m, T) by (T, n): T is cut into groups
  return a.empty() || b.empty() ? 0 : product(a) * b.back();
}

/// addr(self, a (m), b (n)) and outer(a, b): every element of one meets every one of the other.
template <size_t First>
int64_t outer_product(Inputs inputs) {
  return product(sizes(inputs, First)) * product(sizes(inputs, First + 1));
}

const std::unordered_map<std::string_view, Macs>& formulae() {
  static const std::unordered_map<std::string_view, Macs> kFormulae = {
      {"aten::mm", matrix_product<0>},
      {"aten::addmm", matrix_product<1>},
      {"aten::bmm", matrix_product<0>},
      {"aten::baddbmm", matrix_product<1>},
      {"aten::addbmm", matrix_product<1>},
      {"aten::mv", matrix_product<0>},
      {"aten::addmv", matrix_product<1>},
      {"aten::dot", matrix_product<0>},
      {"aten::vdot", matrix_product<0>},
      {"aten::outer", outer_product<0>},
      {"aten::addr", outer_product<1>},
      {"aten::_int_mm", matrix_product<0>},
      {"aten::_scaled_mm", matrix_product<0>},
      {"aten::_addmm_activation", matrix_product<1>},
      {"aten::_grouped_mm", grouped_product},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
      {"aten::conv_tbc", convolution_tbc},
      {"aten::conv_tbc_backward", convolution_tbc_backward},
      {"aten::mkldnn_rnn_layer", recurrent_layer<1>},
      {"aten::mkldnn_rnn_layer_backward", recurrent_layer<2>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_flash_attention", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_efficient_attention", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_cudnn_attention", attention<0, 1, 1>},
      // Backward computes the scores again, then the gradients of values, probabilities, queries and keys.
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention<1, 3, 2>},
      {"aten::_scaled_dot_product_flash_attention_backward", attention<1, 3, 2>},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention<1, 3, 2>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", attention<1, 3, 2>},
  };
  return kFormulae;
}

bool is_any_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

bool may_multiply(std::string_view name) {
  const size_t colons = name.find("::");
  if (colons == std::string_view::npos) return false;  // a region of the program's, or one of autograd's nodes
  const std::string_view library = name.substr(0, colons);
  std::string_view rest = name.substr(colons + 2);
  // Deeptide's own multiply by torch's, which count themselves.
  if (library != "aten") return !is_any_of(library, {"c10d", "_c10d_functional", "deeptide", "prim", "profiler"});
  if (rest.starts_with('_')) rest.remove_prefix(1);
  if (rest.starts_with("linalg_")) {
    return !is_any_of(rest, {"linalg_check_errors", "linalg_cross", "linalg_diagonal", "linalg_matrix_norm",
                             "linalg_norm", "linalg_vecdot", "linalg_vector_norm"});
  }
  return rest.starts_with("fft_") || rest.starts_with("cholesky") || rest.starts_with("cdist_") ||
         rest.starts_with("embedding_bag") || rest.starts_with("grid_sampler_") ||
         is_any_of(rest, {"geqrf", "ormqr", "triangular_solve", "cudnn_rnn", "cudnn_rnn_backward", "miopen_rnn",
                          "miopen_rnn_backward"});
}

int64_t macs_of(const at::RecordFunction& function) {
  const auto found = formulae().find(function.name());
  return found == formulae().end() ? 0 : found->second(function.inputs());
}

}  // namespace deeptide::report
