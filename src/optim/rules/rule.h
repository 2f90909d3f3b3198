// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// An optimizer as a rule: which states it keeps of each element, and one step over a flat segment of a shard.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "deeptide/hyperparameters.h"
#include "numerics/rounding/packed.h"
#include "numerics/sums/ordered_sum.h"
#include "optim/updates/update_scalars.h"

namespace deeptide::optim {

/// The elements on which one step of an element depends.
enum class Reach : uint8_t {
  elementwise,      // the element's own gradient and states: a shard may be cut anywhere
  parameter_norms,  // and sums over its whole parameter, as LAMB's: a NormRule
  whole_parameter,  // its whole parameter as a matrix, as Muon's: a MatrixRule
  callers,          // what the caller's own optimizer makes of it: a CustomRule
};

/// The place of the random bits of a segment's first element; those of a step follow from its number.
struct StochasticRounding {
  uint64_t seed = 0;
  int64_t first = 0;  // the element's index among all that are trained
};

/// A state: one fp32 number per element, zero before the first step.
struct StateRole {
  std::string name;                    // in checkpoints, `full_state` and messages
  const char* unless_zero = nullptr;   // the hyper-parameter at whose 0 the state is not kept
  const char* only_at_zero = nullptr;  // ... or that without whose 0 it is not
};

/// The flat tensors of one segment, all (N,), contiguous, on one device. An elementwise rule also takes a master of 16
/// bits, which is the parameter itself, and states of 16 bits: they are widened, stepped in fp32 and rounded once. With
/// `low` the master is packed: the parameter in bf16, and what rounding it would lose.
struct Segment {
  at::Tensor master;                 // fp32, or bf16 | fp16; updated
  std::vector<at::Tensor> states;    // fp32, or as the master; updated; by the rule's roles, undefined if not kept
  numerics::Contributions gradient;  // read, and summed on the way
  at::Tensor param;                  // bf16 | fp16, receives the rounded fp32 master; undefined if it is the master
  int64_t rows = 1;                  // of a whole parameter as a matrix (rows, N / rows), for rules that take it so
  at::Tensor low = {};               // int16; updated; undefined: the master is not packed
  numerics::HalfwayBits* halfway = nullptr;         // of a packed master
  int64_t first = 0;                                // the first element's index there
  std::optional<StochasticRounding> rounding = {};  // of states in bf16; absent: states of 16 bits round to nearest

  numerics::PackedRange packed() const;
};

/// Which step this is.
struct StepTerms {
  int64_t step = 1;             // counted from 1
  double gradient_scale = 1.0;  // applied to the gradient's sum
};

class CompressedRule;
class MatrixRule;
class NormRule;

class Rule {
 public:
  /// `info`: the optimizer's entry in the configuration's table, which outlives the rule.
  Rule(const OptimizerInfo& info, std::vector<StateRole> roles, Reach reach = Reach::elementwise);
  virtual ~Rule() = default;
  Rule(const Rule&) = delete;
  Rule& operator=(const Rule&) = delete;

  const OptimizerInfo& info() const { return info_; }
  const std::string& name() const { return info_.name; }
  /// Returns what a step under these hyper-parameters depends on.
  virtual Reach reach(const Hyperparameters& /*hyper*/) const { return reach_; }
  const std::vector<StateRole>& roles() const { return roles_; }
  /// This rule by its kind; null: it is of another.
  virtual const NormRule* norms() const { return nullptr; }
  virtual const MatrixRule* matrices() const { return nullptr; }
  virtual const CompressedRule* compressed() const { return nullptr; }
  /// Whether it is a CustomRule.
  bool is_callers() const { return reach_ == Reach::callers; }
  /// The numbers that the rule keeps of each parameter as a whole, as they are before the first step.
  virtual std::vector<double> parameter_numbers() const { return {}; }
  /// Whether a group with these hyper-parameters needs the state of role `role`.
  bool keeps(size_t role, const Hyperparameters& hyper) const;
  /// Why states of 16 bits would spoil a step under these hyper-parameters; empty: they would not.
  virtual std::string needs_fp32_states(const Hyperparameters& /*hyper*/) const { return {}; }
  /// The names of the hyper-parameters that the step reads.
  const std::set<std::string>& names_read() const { return names_read_; }

  /// One step over a segment; for a rule that reaches beyond elements the segment is one whole parameter. An
  /// elementwise rule gives the same bits however a shard is cut. The kernels give the same bits on any number of
  /// threads, and those for GPUs the bits of a CPU's that fuses multiply-adds; the products of matrices are torch's.
  /// Errors: ValueError on tensors that do not fit, hyper-parameters of another rule, or a step below 1.
  void step(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const;
  /// The numbers of a step that a kernel for GPUs does; absent: the rule has no kernel.
  virtual std::optional<UpdateScalars> kernel_update(const Hyperparameters& /*hyper*/,
                                                     const StepTerms& /*terms*/) const {
    return std::nullopt;
  }
  /// The same as `step` in ATen operators: the tests' oracle, and what devices without a kernel of their own run.
  void step_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const;

 protected:
  /// The index of a hyper-parameter, for `hyper[index]` in steps. Errors: std::logic_error when the table lacks it.
  size_t index_of(const char* name);
  /// The checks of `step`, and, of a pass that reads no gradient, those of the other tensors. Errors: ValueError.
  void check(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const;
  void check_states(const Segment& segment, const Hyperparameters& hyper) const;

 private:
  void check_packed(const Segment& segment, bool takes_16_bits) const;
  virtual void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const = 0;
  virtual void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const = 0;

  const OptimizerInfo& info_;
  std::vector<StateRole> roles_;
  Reach reach_;
  std::set<std::string> names_read_;
};

/// All rules whose optimizer the configuration's table has, in the table's order.
const std::vector<const Rule*>& all_rules();
/// The rule of an optimizer's type such as "AdamW", in any case. Errors: ConfigError naming the types that exist.
const Rule& find_rule(std::string_view type);

/// Makes a rule known; one static object in each rule's file.
class Registration {
 public:
  using Make = std::unique_ptr<Rule> (*)(const OptimizerInfo& info);
  /// `name`: the first type of the optimizer's entry in the configuration's table.
  Registration(const char* name, Make make);
};

template <typename T>
std::unique_ptr<Rule> make_rule(const OptimizerInfo& info) {
  return std::make_unique<T>(info);
}

/// The names under which rules have been registered, for the test that compares them with the table.
std::vector<std::string> registered_names();

/// Highway's name of the instruction set that the steps run on here, such as "AVX3_ZEN4".
const char* kernel_target();

}  // namespace deeptide::optim
