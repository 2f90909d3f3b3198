// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds torch's operator on oneDNN by name, because it is not one of torch's C++ functions.
#include "ops/matmul.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>

namespace deeptide::ops {

using at::Tensor;

namespace {

constexpr int64_t kWorthwhile = 1 << 20;  // products; below it the call costs more than it saves

using OneDnnLinear = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
                            c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

/// Absent in a torch that was built without oneDNN.
const std::optional<c10::TypedOperatorHandle<OneDnnLinear>>& onednn_linear() {
  static const auto found = []() -> std::optional<c10::TypedOperatorHandle<OneDnnLinear>> {
    const auto schema = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!schema || !schema->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    return schema->typed<OneDnnLinear>();
  }();
  return found;
}

bool blas_is_slow() {
#if defined(__x86_64__)
  static const bool slow = __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("intel");
  return slow;
#else
  return false;
#endif
}

}  // namespace

bool onednn_multiplies(const Tensor& a_MK, const Tensor& b_NK) {
  return a_MK.is_cpu() && blas_is_slow() && a_MK.scalar_type() == at::kFloat && b_NK.scalar_type() == at::kFloat &&
         a_MK.numel() * b_NK.size(0) >= kWorthwhile && onednn_linear();
}

Tensor product_nt(const Tensor& a_MK, const Tensor& b_NK, const std::optional<Tensor>& bias_N) {
  if (!onednn_multiplies(a_MK, b_NK)) return at::linear(a_MK, b_NK, bias_N);
  return onednn_linear()->call(a_MK, b_NK, bias_N, "none", c10::List<std::optional<at::Scalar>>(), "");
}

}  // namespace deeptide::ops
