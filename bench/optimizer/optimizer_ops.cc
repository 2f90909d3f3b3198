// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The engine's kernels as operators of torch, for optimizer_step.py; and the loop that sets their limit.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>

#include "device/parallel.h"
#include "numerics/rounding/sign_bits.h"
#include "numerics/sums/ordered_sum.h"
#include "optim/rules/rule.h"

namespace {

using at::Tensor;

/// The norm of a gradient that came as one row: a world of one, or a sum that the transport took.
void squares(const Tensor& gradient, const Tensor& sum_of_squares) {
  deeptide::numerics::ordered_squares({gradient}, sum_of_squares);
}

/// A step with the table's hyper-parameters and `more` of them by name. `states`: those that the rule keeps, in order.
void rule_step(const std::string& type, const Tensor& master, at::TensorList states, const Tensor& gradient,
               const std::optional<Tensor>& param, int64_t step, double gradient_scale, int64_t rows,
               const c10::Dict<std::string, double>& more) {
  const deeptide::optim::Rule& rule = deeptide::optim::find_rule(type);
  deeptide::Hyperparameters hyper(type);
  for (const auto& number : more) hyper.set(number.key(), number.value());
  deeptide::optim::Segment segment{master, {}, gradient, param.value_or(Tensor()), rows};
  for (size_t role = 0, next = 0; role < rule.roles().size(); ++role) {
    segment.states.push_back(rule.keeps(role, hyper) ? states.at(next++) : Tensor());
  }
  rule.step(segment, hyper, {step, gradient_scale});
}

/// The same with a packed master: `param` in bf16 and its `low` halves. States in bf16 are rounded stochastically.
void packed_step(const std::string& type, const Tensor& param, const Tensor& low, at::TensorList states,
                 const Tensor& gradient, int64_t step, double gradient_scale) {
  static std::map<const void*, deeptide::numerics::HalfwayBits> halfway;
  const deeptide::optim::Rule& rule = deeptide::optim::find_rule(type);
  deeptide::optim::Segment segment{param, states.vec(), gradient, {}};
  segment.low = low;
  segment.halfway = &halfway.try_emplace(low.const_data_ptr(), low.numel()).first->second;
  segment.rounding = {.seed = 1, .first = 0};
  rule.step(segment, deeptide::Hyperparameters(type), {step, gradient_scale});
}

/// Compiled once for each instruction set, chosen when the library is loaded.
#define DEEPTIDE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))

DEEPTIDE_CLONES void triad_loop_1(float* __restrict p, const float* __restrict g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = p[i] * 0.5f + g[i];
}

DEEPTIDE_CLONES void triad_loop_2(float* __restrict p, float* __restrict m, const float* __restrict g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = p[i] * 0.5f + g[i];
    m[i] = m[i] * 0.5f + g[i];
  }
}

DEEPTIDE_CLONES void triad_loop_3(float* __restrict p, float* __restrict m, float* __restrict v,
                                  const float* __restrict g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = p[i] * 0.5f + g[i];
    m[i] = m[i] * 0.5f + g[i];
    v[i] = v[i] * 0.5f + g[i];
  }
}

/// An fp32 step's streams with next to no arithmetic: one read, and each of `updated` (one to three) read and written,
/// so 4 bytes per element and 8 more for each.
void triad(at::TensorList updated, const Tensor& g) {
  TORCH_CHECK_VALUE(!updated.empty() && updated.size() <= 3, "triad: got ", updated.size(),
                    " tensors, expected 1 to 3");
  deeptide::parallel_blocks(g.numel(), /*block=*/1024, /*grain=*/32, [&](int64_t begin, int64_t end) {
    const auto at = [&](size_t i) { return updated[i].mutable_data_ptr<float>() + begin; };
    const float* read = g.const_data_ptr<float>() + begin;
    if (updated.size() == 1) triad_loop_1(at(0), read, end - begin);
    if (updated.size() == 2) triad_loop_2(at(0), at(1), read, end - begin);
    if (updated.size() == 3) triad_loop_3(at(0), at(1), at(2), read, end - begin);
  });
}

}  // namespace

TORCH_LIBRARY(deeptide_bench, library) {
  library.def("squares(Tensor gradient, Tensor(a!) sum_of_squares) -> ()", &squares);
  library.def(
      "rule_step(str type, Tensor(a!) master, Tensor(b!)[] states, Tensor gradient, Tensor(c!)? param, int step, "
      "float gradient_scale, int rows, Dict(str, float) more) -> ()",
      &rule_step);
  library.def(
      "packed_step(str type, Tensor(a!) param, Tensor(b!) low, Tensor(c!)[] states, Tensor gradient, int step, "
      "float gradient_scale) -> ()",
      &packed_step);
  library.def("split_signs(Tensor(a!) values, Tensor scale, Tensor(b!) bits) -> ()", &deeptide::numerics::split_signs);
  library.def("add_signs(Tensor bits, Tensor scale, Tensor(a!) values) -> ()", &deeptide::numerics::add_signs);
  library.def("set_signs(Tensor bits, Tensor scale, Tensor(a!) values) -> ()", &deeptide::numerics::set_signs);
  library.def("triad(Tensor(a!)[] updated, Tensor g) -> ()", &triad);
}
