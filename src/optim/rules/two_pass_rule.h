// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rules whose step of an element needs more than a shard has: two passes around what concerns whole parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "numerics/sums/piece_squares.h"
#include "optim/rules/rule.h"

namespace deeptide::optim {

/// Squares of one parameter's norms.
struct NormSquares {
  double param = 0.0;
  double update = 0.0;  // the step to come, before learning rate and ratio
};

/// The same being summed over a range of a parameter's elements.
struct NormSums {
  explicit NormSums(int64_t numel) : param(numel), update(numel) {}
  NormSquares totals() const { return {param.total(), update.total()}; }

  numerics::PieceSquares param, update;
};

/// Reach::parameter_norms: a parameter's step is scaled by a function of two norms over it.
/// The rule itself is constructed by the final class, since a rule may also be a CompressedRule.
class NormRule : public virtual Rule {
 public:
  const NormRule* norms() const final { return this; }
  /// First pass: moves the states and adds the squares. `first`: the segment's place in the sums' range.
  /// Errors: as `step`.
  void measure(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
               NormSums& sums) const;
  virtual double ratio(const NormSquares& whole, const Hyperparameters& hyper) const = 0;
  /// The ratio of a step in training, which may leave a trace in the parameter's numbers (Rule::parameter_numbers).
  virtual double next_ratio(const NormSquares& whole, const Hyperparameters& hyper,
                            std::span<double> /*numbers*/) const {
    return ratio(whole, hyper);
  }
  /// The numbers of both passes where kernels for GPUs do them; absent: the rule has none.
  virtual std::optional<LambScalars> kernel_scalars(const Hyperparameters& /*hyper*/, const StepTerms& /*terms*/,
                                                    double /*ratio*/) const {
    return std::nullopt;
  }
  /// Second pass: moves the master by `ratio` times the step that the states give. Reads no gradient.
  void apply(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, double ratio) const;

 private:
  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const final;
  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const final;
  virtual void measure_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                           NormSums& sums) const = 0;
  virtual void apply_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                         double ratio) const = 0;
  virtual void measure_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                            NormSums& sums) const = 0;
  /// Moves the master only.
  virtual void apply_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                          double ratio) const = 0;
};

/// A parameter's sizes as a matrix.
struct MatrixSizes {
  int64_t rows = 1;
  int64_t columns = 1;
};

/// Whether a parameter of this name and shape is a matrix to Muon: two dimensions or more, and neither an embedding nor
/// the output layer, by their names. Source: DeepSpeed's choice where a parameter has no `use_muon`.
bool is_muon_matrix(std::string_view name, at::IntArrayRef sizes);

/// Reach::whole_parameter: a parameter's step is a function of a matrix of directions, of which each rank makes a part.
class MatrixRule : public Rule {
 public:
  MatrixRule(const OptimizerInfo& info, std::vector<StateRole> roles);
  const MatrixRule* matrices() const final { return this; }

  /// First pass: moves the states and writes `direction` (N,), bf16. Errors: as `step`.
  void direct(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
              const at::Tensor& direction) const;
  /// The whole parameter's update. Shapes: (rows, columns) bf16 -> the same, in rows.
  virtual at::Tensor update_of(const at::Tensor& direction, const Hyperparameters& hyper) const = 0;
  /// Second pass: moves the master, and `param` if there is one, by their elements of the update. Shapes: (N,) all;
  /// update bf16.
  void apply(const at::Tensor& master, const at::Tensor& param, const Hyperparameters& hyper, MatrixSizes sizes,
             const at::Tensor& update) const;

 private:
  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const final;
  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const final;
  /// A step under hyper-parameters whose reach is elementwise.
  virtual void step_elements(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                             bool on_cpu) const = 0;
  virtual void direct_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                          const at::Tensor& direction) const = 0;
  virtual void apply_cpu(const at::Tensor& master, const at::Tensor& param, const Hyperparameters& hyper,
                         MatrixSizes sizes, const at::Tensor& update) const = 0;
  virtual void direct_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                           const at::Tensor& direction) const = 0;
  /// Moves the master only.
  virtual void apply_aten(const at::Tensor& master, const Hyperparameters& hyper, MatrixSizes sizes,
                          const at::Tensor& update) const = 0;
};

}  // namespace deeptide::optim
