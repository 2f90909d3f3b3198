// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Segments to step in tests, at any alignment, and the hyper-parameters under which each rule is tried.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <string>
#include <vector>

#include "optim/rule.h"

namespace deeptide::optim {

/// A view of n elements that starts `offset` elements into its storage; three more follow it there.
inline at::Tensor shifted(const at::Tensor& values, int64_t offset) {
  at::Tensor storage = at::zeros({values.numel() + offset + 3}, values.options());
  return storage.narrow(0, offset, values.numel()).copy_(values);
}

/// Random values; states are small and not negative, as second moments are.
inline Segment make_segment(const Rule& rule, const Hyperparameters& hyper, int64_t numel,
                            at::ScalarType param_dtype = at::kFloat, int64_t offset = 0) {
  Segment made{shifted(at::randn({numel}), offset), {}, shifted(at::randn({numel}), offset), {}};
  for (size_t role = 0; role < rule.roles().size(); ++role) {
    made.states.push_back(rule.keeps(role, hyper) ? shifted(at::rand({numel}) * 0.01, offset) : at::Tensor());
  }
  if (param_dtype != at::kFloat) made.param = shifted(at::zeros({numel}, param_dtype), offset);
  return made;
}

/// Applies `change` to each tensor but the gradient.
template <typename Change>
Segment changed(const Segment& s, const numerics::Contributions& gradient, const Change& change) {
  const auto of = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  Segment made{of(s.master), {}, gradient, of(s.param)};
  for (const at::Tensor& state : s.states) made.states.push_back(of(state));
  return made;
}

inline Segment copy_of(const Segment& s) {
  return changed(s, s.gradient, [](const at::Tensor& tensor) { return tensor.clone(); });
}

inline Segment narrow(const Segment& s, int64_t begin, int64_t length) {
  return changed(s, s.gradient.narrow(begin, length),
                 [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, length); });
}

/// Those that a step writes.
inline std::vector<at::Tensor> written(const Segment& s) {
  std::vector<at::Tensor> tensors{s.master};
  for (const at::Tensor& state : s.states) {
    if (state.defined()) tensors.push_back(state);
  }
  if (s.param.defined()) tensors.push_back(s.param);
  return tensors;
}

inline bool same_bits(const Segment& a, const Segment& b) {
  const auto one = written(a), other = written(b);
  if (one.size() != other.size()) return false;
  for (size_t i = 0; i < one.size(); ++i) {
    if (!at::equal(one[i], other[i])) return false;
  }
  return true;
}

/// Hyper-parameters that reach each branch of a rule; its table's defaults are the first. Empty: the rule has no
/// variants here yet.
inline std::vector<Hyperparameters> variants_of(const Rule& rule) {
  using Numbers = std::map<std::string, double>;
  static const std::map<std::string, std::vector<Numbers>> kVariants{
      {"Adam",
       {{},
        {{"weight_decay", 0.1}},
        {{"weight_decay", 0.1}, {"decoupled_weight_decay", 0}},
        {{"bias_correction", 0}},
        {{"beta1", 0.0}, {"beta2", 0.5}},
        {{"beta1", 0.3}, {"eps", 1e-3}}}},
      {"SGD",
       {{},
        {{"lr", 0.1}, {"weight_decay", 0.01}},
        {{"lr", 0.1}, {"momentum", 0.9}},
        {{"lr", 0.1}, {"momentum", 0.9}, {"dampening", 0.2}, {"weight_decay", 0.01}},
        {{"lr", 0.1}, {"momentum", 0.9}, {"nesterov", 1}}}},
      {"Lion", {{}, {{"lr", 0.01}, {"weight_decay", 0.1}}, {{"beta1", 0.5}, {"beta2", 0.0}}}},
      {"Adagrad", {{}, {{"lr", 0.1}, {"weight_decay", 0.1}}, {{"lr_decay", 0.01}, {"eps", 1e-3}}}},
  };
  std::vector<Hyperparameters> variants;
  const auto found = kVariants.find(rule.name());
  if (found == kVariants.end()) return variants;
  for (const Numbers& numbers : found->second) {
    Hyperparameters hyper(rule.info());
    for (const auto& [name, value] : numbers) hyper.set(name, value);
    variants.push_back(hyper);
  }
  return variants;
}

}  // namespace deeptide::optim
