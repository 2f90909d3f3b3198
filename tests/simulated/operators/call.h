// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One call of an operator: its arguments, and what its shape function says of its results.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "simulated/operators/operands.h"

namespace deeptide::simulated {

using Stack = std::vector<c10::IValue>;

class Call {
 public:
  /// Takes the arguments from the stack.
  Call(const c10::OperatorHandle& op, Stack& stack);

  const c10::OperatorHandle& op() const { return op_; }
  const std::string& name() const { return name_; }
  const Stack& arguments() const { return arguments_; }
  size_t num_results() const { return results_.size(); }
  bool writes_argument(size_t i) const { return is_written(parameters_[i]); }
  bool writes_result(size_t i) const { return is_written(results_[i]); }
  /// Returns the argument that a result aliases; null for a new tensor.
  const c10::IValue* aliased_argument(size_t result) const;
  /// Whether it draws random numbers.
  bool is_random() const;

  /// The arguments as the CPU's kernel takes them; device tensors are noted in `operands`.
  Stack cpu_arguments(Operands& operands) const;
  /// The arguments without memory.
  Stack meta_arguments(Operands& operands) const;

 private:
  using Twin = std::function<at::Tensor(const at::Tensor&, bool write)>;

  static bool is_written(const c10::Argument& argument);
  at::Tensor host_argument(const at::Tensor& tensor, bool write) const;
  Stack map(const Twin& twin, c10::Device device) const;

  c10::OperatorHandle op_;
  const std::vector<c10::Argument>& parameters_;
  const std::vector<c10::Argument>& results_;
  std::string name_;
  Stack arguments_;
};

/// A shape function's answer: the results, and the arguments as it left them (an `out` may be resized).
struct Shapes {
  bool known = false;
  Stack results, arguments;
};

/// Asks the operator's Meta kernel, or what it said for the same geometry: these kernels are often Python's, and take
/// 100 us and more.
Shapes shapes_of(const Call& call);

}  // namespace deeptide::simulated
