// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The engine's kernels as operators of torch, for bench/optimizer_step.py; and the loop that sets their limit.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "device/parallel.h"
#include "numerics/ordered_sum.h"
#include "optim/rule.h"

namespace {

using at::Tensor;

/// The norm of a gradient that came as one row: a world of one, or a sum that the transport took.
void squares(const Tensor& gradient, const Tensor& sum_of_squares) {
  deeptide::numerics::ordered_squares({gradient}, sum_of_squares);
}

void adam_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& gradient,
               const std::optional<Tensor>& param, int64_t step, double gradient_scale) {
  static const deeptide::optim::Rule& adam = deeptide::optim::find_rule("AdamW");
  static const deeptide::Hyperparameters defaults("AdamW");
  adam.step({master, {exp_avg, exp_avg_sq}, gradient, param.value_or(Tensor())}, defaults, {step, gradient_scale});
}

/// Compiled once for each instruction set, chosen when the library is loaded.
__attribute__((target_clones("avx512f", "avx2", "default"))) void triad_loop(float* __restrict p, float* __restrict m,
                                                                             float* __restrict v,
                                                                             const float* __restrict g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = p[i] * 0.5f + g[i];
    m[i] = m[i] * 0.5f + g[i];
    v[i] = v[i] * 0.5f + g[i];
  }
}

/// An fp32 step's seven streams, four read and three written, with next to no arithmetic: 28 bytes an element.
void triad(const Tensor& p, const Tensor& m, const Tensor& v, const Tensor& g) {
  deeptide::parallel_blocks(g.numel(), /*block=*/1024, /*grain=*/32, [&](int64_t begin, int64_t end) {
    triad_loop(p.mutable_data_ptr<float>() + begin, m.mutable_data_ptr<float>() + begin,
               v.mutable_data_ptr<float>() + begin, g.const_data_ptr<float>() + begin, end - begin);
  });
}

}  // namespace

TORCH_LIBRARY(deeptide_bench, library) {
  library.def("squares(Tensor gradient, Tensor(a!) sum_of_squares) -> ()", &squares);
  library.def(
      "adam_step(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor gradient, Tensor(d!)? param, "
      "int step, float gradient_scale) -> ()",
      &adam_step);
  library.def("triad(Tensor(a!) p, Tensor(b!) m, Tensor(c!) v, Tensor g) -> ()", &triad);
}
