// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rules that, in some of their steps, need no mean of the gradients: ranks exchange one bit per element in its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <span>

#include "optim/rules/rule.h"
#include "optim/rules/two_pass_rule.h"

namespace deeptide::optim {

/// The data that ranks exchange for a step.
enum class Exchanged : uint8_t {
  gradients,  // their mean, as for any rule: Rule::step
  signs,      // the mean of what each rank offers, from signs and scales: `offer`, then `take`
};

class CompressedElementRule;
class CompressedNormRule;

/// A rank has whole parameters, states and gradients, and offers the momentum that its own gradient makes.
class CompressedRule : public virtual Rule {
 public:
  const CompressedRule* compressed() const final { return this; }
  /// This rule by its second pass: one of the two.
  virtual const CompressedElementRule* by_elements() const { return nullptr; }
  virtual const CompressedNormRule* by_norms() const { return nullptr; }
  /// Returns what the step-th step exchanges, counted from 1. One answer for the whole model: see `exchanged_by`.
  virtual Exchanged exchanged(const Hyperparameters& hyper, int64_t step) const = 0;
  /// First pass: adds to `carried` (N,) fp32 what this rank offers for the mean. The segment's gradient is this rank's
  /// own; its master and states stay. Errors: as `step`.
  void offer(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
             const at::Tensor& carried) const;
  /// The same in ATen operators: the tests' oracle, and what devices without a kernel of their own run.
  void offer_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                       const at::Tensor& carried) const;

 protected:
  /// Errors: ValueError unless `values` is like the segment's master.
  void check_exchanged(const char* name, const at::Tensor& values, const Segment& segment) const;

 private:
  /// The share of the gradient in the momentum: 1 - beta1.
  virtual float momentum_weight(const Hyperparameters& hyper) const = 0;
};

/// One whose second pass is elementwise.
class CompressedElementRule : public CompressedRule {
 public:
  const CompressedElementRule* by_elements() const final { return this; }
  /// Second pass: moves states and master by the mean (N,) fp32. Reads no gradient.
  void take(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, const at::Tensor& mean) const;
  /// In ATen operators.
  void take_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                      const at::Tensor& mean) const;

 private:
  virtual void take_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                        const at::Tensor& mean) const = 0;
  /// Moves master and states only.
  virtual void take_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                         const at::Tensor& mean) const = 0;
};

/// Over a whole parameter: squares before and after the weight decay, and the largest quotient of the frozen and the
/// moving denominator.
struct TakenTotals {
  double direction = 0.0, update = 0.0, factor = 0.0;
};

/// The sums over a range of elements that a step by signs needs of a whole parameter.
class TakenSums {
 public:
  explicit TakenSums(int64_t numel) : direction(numel), update(numel) {}

  /// Thread-safe, as is note_factor.
  TakenTotals totals() const;
  void note_factor(float of_some);

  numerics::PieceSquares direction, update;

 private:
  mutable std::mutex mutex_;
  float factor_ = 0.0f;
};

/// A NormRule, in steps by signs too: their second pass moves the states and sums up, their third is `apply`.
class CompressedNormRule : public CompressedRule, public NormRule {
 public:
  const CompressedNormRule* by_norms() const final { return this; }
  /// Second pass: moves the states by the mean (N,) fp32. `first`: the segment's place in the sums' range.
  void take_states(const Segment& segment, const Hyperparameters& hyper, std::span<const double> numbers,
                   const at::Tensor& mean, int64_t first, TakenSums& sums) const;
  /// The same in ATen operators: the tests' oracle, and what devices without a kernel of their own run.
  void take_states_reference(const Segment& segment, const Hyperparameters& hyper, std::span<const double> numbers,
                             const at::Tensor& mean, int64_t first, TakenSums& sums) const;
  /// The ratio for `apply`; moves the parameter's numbers.
  virtual double taken_ratio(const TakenTotals& whole, const Hyperparameters& hyper,
                             std::span<double> numbers) const = 0;

 private:
  virtual void take_states_cpu(const Segment& segment, const Hyperparameters& hyper, std::span<const double> numbers,
                               const at::Tensor& mean, int64_t first, TakenSums& sums) const = 0;
  virtual void take_states_aten(const Segment& segment, const Hyperparameters& hyper, std::span<const double> numbers,
                                const at::Tensor& mean, int64_t first, TakenSums& sums) const = 0;
};

/// Returns what the step-th step exchanges: gradients as long as any group needs them.
Exchanged exchanged_by(const Rule& rule, const std::vector<Hyperparameters>& groups, int64_t step);

}  // namespace deeptide::optim
