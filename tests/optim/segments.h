// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Segments to step in tests, at any alignment, and the hyper-parameters under which each rule is tried.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "optim/rules/two_pass_rule.h"

namespace deeptide::optim {

/// A view of n elements that starts `offset` elements into its storage; three more follow it there.
inline at::Tensor shifted(const at::Tensor& values, int64_t offset) {
  at::Tensor storage = at::zeros({values.numel() + offset + 3}, values.options());
  return storage.narrow(0, offset, values.numel()).copy_(values);
}

/// Random values; states are small and not negative, as second moments are, and averages are smaller than the root of
/// their squares'.
inline Segment make_segment(const Rule& rule, const Hyperparameters& hyper, int64_t numel,
                            at::ScalarType param_dtype = at::kFloat, int64_t offset = 0) {
  Segment made{shifted(at::randn({numel}), offset), {}, shifted(at::randn({numel}), offset), {}};
  for (size_t role = 0; role < rule.roles().size(); ++role) {
    made.states.push_back(rule.keeps(role, hyper) ? shifted(at::rand({numel}) * 0.01, offset) : at::Tensor());
    if (rule.roles()[role].name == "grad_avg" && made.states[role].defined()) made.states[role].copy_(made.states[0]);
  }
  if (param_dtype != at::kFloat) made.param = shifted(at::zeros({numel}, param_dtype), offset);
  return made;
}

/// Applies `change` to each tensor but the gradient.
template <typename Change>
Segment changed(const Segment& s, const numerics::Contributions& gradient, const Change& change) {
  const auto of = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  Segment made{of(s.master), {}, gradient, of(s.param), s.rows, of(s.low), s.halfway, s.first, s.rounding};
  for (const at::Tensor& state : s.states) made.states.push_back(of(state));
  return made;
}

inline Segment copy_of(const Segment& s) {
  return changed(s, s.gradient, [](const at::Tensor& tensor) { return tensor.clone(); });
}

inline Segment narrow(const Segment& s, int64_t begin, int64_t length) {
  Segment made = changed(s, s.gradient.narrow(begin, length),
                         [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, length); });
  made.rows = 1;
  made.first += begin;
  if (made.rounding) made.rounding->first += begin;
  return made;
}

/// Those that a step writes.
inline std::vector<at::Tensor> written(const Segment& s) {
  std::vector<at::Tensor> tensors{s.master};
  for (const at::Tensor& state : s.states) {
    if (state.defined()) tensors.push_back(state);
  }
  if (s.param.defined()) tensors.push_back(s.param);
  if (s.low.defined()) tensors.push_back(s.low);
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

/// A step of one whole parameter split into pieces, as shards and blocks cut it. `cuts`: where pieces begin,
/// ascending from 0, then the parameter's end.
inline void step_in_pieces(const Rule& rule, const Segment& whole, const std::vector<int64_t>& cuts,
                           const Hyperparameters& hyper, const StepTerms& terms) {
  const int64_t numel = whole.master.numel();
  const auto each_piece = [&](auto visit) {
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      visit(narrow(whole, cuts[i], cuts[i + 1] - cuts[i]), cuts[i], cuts[i + 1] - cuts[i]);
    }
  };
  if (rule.reach(hyper) == Reach::elementwise) {
    each_piece([&](const Segment& piece, int64_t, int64_t) { rule.step(piece, hyper, terms); });
  } else if (rule.reach(hyper) == Reach::parameter_norms) {
    const auto& norm_rule = dynamic_cast<const NormRule&>(rule);
    NormSums sums(numel);
    each_piece(
        [&](const Segment& piece, int64_t begin, int64_t) { norm_rule.measure(piece, hyper, terms, begin, sums); });
    const double ratio = norm_rule.ratio(sums.totals(), hyper);
    each_piece([&](const Segment& piece, int64_t, int64_t) { norm_rule.apply(piece, hyper, terms, ratio); });
  } else {
    const auto& matrix_rule = dynamic_cast<const MatrixRule&>(rule);
    const MatrixSizes sizes{whole.rows, numel / whole.rows};
    const at::Tensor direction = at::zeros({numel}, at::kBFloat16);
    each_piece([&](const Segment& piece, int64_t begin, int64_t length) {
      matrix_rule.direct(piece, hyper, terms, direction.narrow(0, begin, length));
    });
    const at::Tensor update = matrix_rule.update_of(direction.view({sizes.rows, sizes.columns}), hyper).view({numel});
    each_piece([&](const Segment& piece, int64_t begin, int64_t length) {
      matrix_rule.apply(piece.master, piece.param, hyper, sizes, update.narrow(0, begin, length));
    });
  }
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
      {"RMSprop",
       {{},
        {{"weight_decay", 0.1}, {"eps", 1e-3}},
        {{"momentum", 0.9}},
        {{"centered", 1}, {"alpha", 0.9}},
        {{"centered", 1}, {"alpha", 0.3}, {"momentum", 0.5}, {"weight_decay", 0.01}}}},
      {"Lamb",
       {{},
        {{"lr", 0.01}, {"weight_decay", 0.1}, {"bias_correction", 0}},
        {{"eps", 1e-3}, {"eps_inside_sqrt", 1}, {"beta1", 0.3}},
        {{"max_coeff", 0.5}, {"min_coeff", 0.1}},
        {{"max_coeff", 100.0}, {"min_coeff", 50.0}}}},
      {"OneBitAdam", {{}, {{"weight_decay", 0.1}}, {{"beta1", 0.3}, {"eps", 1e-3}}}},
      {"ZeroOneAdam", {{}, {{"weight_decay", 0.1}}, {{"beta1", 0.3}, {"eps", 1e-3}}}},
      {"OneBitLamb", {{}, {{"lr", 0.01}, {"weight_decay", 0.1}}, {{"eps", 1e-3}, {"beta1", 0.3}, {"max_coeff", 0.5}}}},
      {"Muon",
       {{},
        {{"weight_decay", 0.1}, {"nesterov", 0}, {"momentum", 0.3}},
        {{"match_rms_adamw", 1}, {"ns_steps", 2}},
        {{"use_muon", 0}, {"lr", 1e-3}, {"weight_decay", 0.1}, {"eps", 1e-8}}}},
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

/// Expects a step to throw a ValueError that holds these words.
inline void expect_rejected(const Rule& rule, const Segment& segment, const Hyperparameters& hyper,
                            const std::string& words) {
  try {
    rule.step(segment, hyper, {});
    ADD_FAILURE() << "accepted; expected an error about " << words;
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

}  // namespace deeptide::optim
