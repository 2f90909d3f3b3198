// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rules that, in some of their steps, need no mean of the gradients: ranks exchange one bit per element in its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "optim/rule.h"

namespace deeptide::optim {

/// What ranks exchange for a step.
enum class Exchanged : uint8_t {
  gradients,  // their mean, as for any rule: Rule::step
  signs,      // the mean of what each rank offers, from signs and scales: `offer`, then `take`
};

/// An elementwise rule; a rank has whole parameters, states and gradients.
class CompressedRule : public Rule {
 public:
  using Rule::Rule;

  /// What the step-th step exchanges, counted from 1. One answer for the whole model: see `exchanged_by`.
  virtual Exchanged exchanged(const Hyperparameters& hyper, int64_t step) const = 0;
  /// First pass: adds to `carried` (N,) fp32 what this rank offers for the mean. The segment's gradient is this rank's
  /// own; its master and states stay. Errors: as `step`.
  void offer(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
             const at::Tensor& carried) const;
  /// Second pass: moves states and master by the mean (N,) fp32. Reads no gradient.
  void take(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, const at::Tensor& mean) const;
  /// The same in ATen operators: the tests' oracle, and what devices without a kernel of their own run.
  void offer_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                       const at::Tensor& carried) const;
  void take_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                      const at::Tensor& mean) const;

 private:
  virtual void offer_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                         const at::Tensor& carried) const = 0;
  virtual void take_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                        const at::Tensor& mean) const = 0;
  virtual void offer_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                          const at::Tensor& carried) const = 0;
  /// Moves master and states only.
  virtual void take_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                         const at::Tensor& mean) const = 0;
};

/// What the step-th step exchanges: gradients as long as any group needs them.
Exchanged exchanged_by(const Rule& rule, const std::vector<Hyperparameters>& groups, int64_t step);

}  // namespace deeptide::optim
