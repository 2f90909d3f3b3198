// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The registry of rules, and the checks of every step.
#include "optim/rules/rule.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <map>
#include <stdexcept>

#include "base/invariant.h"
#include "deeptide/errors.h"
#include "numerics/rounding/rounding.h"
#include "numerics/rounding/stochastic_rounding.h"
#include "optim/rules/step_device.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

/// Filled while the library is loaded; function-local, since the order of files is not known.
std::map<std::string, Registration::Make>& registry() {
  static std::map<std::string, Registration::Make> makers;
  return makers;
}

std::vector<const Rule*> make_rules() {
  std::vector<const Rule*> rules;
  for (const OptimizerInfo& info : optimizers()) {
    const auto found = registry().find(info.name);
    if (found != registry().end()) rules.push_back(found->second(info).release());  // kept for the process's life
  }
  return rules;
}

void check_like_master(const std::string& what, const std::string& name, const Tensor& tensor, const Tensor& master) {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": ", name, " is undefined, expected a tensor like master");
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.numel() == master.numel(), what, ": ", name, " has shape ",
                    tensor.sizes(), ", expected ", master.sizes(), " as master has");
  TORCH_CHECK_VALUE(tensor.device() == master.device(), what, ": ", name, " is on ", tensor.device(), ", expected ",
                    master.device(), " as master is");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, ": ", name, " is not contiguous; pass one slice of a flat buffer");
}

/// `also`: a type of 16 bits that is taken too; undefined: none.
void check_type(const std::string& what, const std::string& name, const Tensor& tensor, const Tensor& master,
                at::ScalarType also) {
  check_like_master(what, name, tensor, master);
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == also, what, ": ", name, " is ",
                    tensor.scalar_type(), ", expected Float");
}

void check_gradient(const std::string& what, const numerics::Contributions& gradient, const Tensor& master) {
  if (!gradient.pieces.empty()) {
    DEEPTIDE_INVARIANT(gradient.numel == master.numel(), what, ": pieces of ", gradient.numel, " elements for ",
                       master.numel());
    return;
  }
  TORCH_CHECK_VALUE(!gradient.rows.empty(), what, ": the gradient has no rows, expected one per rank");
  for (const Tensor& row : gradient.rows) {
    check_like_master(what, "gradient", row, master);
    const auto type = row.scalar_type();
    TORCH_CHECK_VALUE(type == at::kFloat || numerics::is_half_width(type), what, ": gradient is ", type,
                      ", expected Float, BFloat16 or Half");
    TORCH_CHECK_VALUE(type == gradient.rows[0].scalar_type(), what, ": a row of the gradient is ", type, ", another ",
                      gradient.rows[0].scalar_type(), "; expected one type");
  }
}

numerics::PackedTensors packed_tensors(const Segment& segment) {
  return {segment.master, segment.low, segment.halfway, segment.first};
}

/// The segment with masters and states in fp32: itself, or copies of what has 16 bits.
Segment widened(const Segment& segment) {
  Segment wide = segment;
  if (segment.low.defined()) {
    wide.master = at::empty(segment.master.sizes(), segment.master.options().dtype(at::kFloat));
    numerics::unpack(packed_tensors(segment), wide.master);
  } else {
    wide.master = segment.master.to(at::kFloat);
  }
  for (Tensor& state : wide.states) {
    if (state.defined()) state = state.to(at::kFloat);
  }
  return wide;
}

void copy_back(const Tensor& wide, const Tensor& narrow) {
  if (narrow.defined() && !wide.is_same(narrow)) narrow.copy_(wide);
}

void copy_master_back(const Tensor& wide, const Segment& segment) {
  if (!segment.low.defined()) return copy_back(wide, segment.master);
  numerics::pack(wide, packed_tensors(segment));
}

void copy_states_back(const Segment& wide, const Segment& segment, int64_t step) {
  int stream = 0;
  for (size_t i = 0; i < wide.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    if (!state.defined()) continue;
    if (!segment.rounding || state.scalar_type() == at::kFloat) {
      copy_back(wide.states[i], state);
    } else {
      const auto key = numerics::RandomKey::of(segment.rounding->seed, static_cast<uint64_t>(step));
      numerics::round_stochastically(wide.states[i], state, key, stream, segment.rounding->first);
    }
    ++stream;
  }
}

}  // namespace

numerics::PackedRange Segment::packed() const {
  if (!low.defined()) return {};
  return {static_cast<uint16_t*>(master.mutable_data_ptr()), static_cast<uint16_t*>(low.mutable_data_ptr()), halfway,
          first};
}

Rule::Rule(const OptimizerInfo& info, std::vector<StateRole> roles, Reach reach)
    : info_(info), roles_(std::move(roles)), reach_(reach) {
  for (const StateRole& role : roles_) {
    for (const char* name : {role.unless_zero, role.only_at_zero}) {
      if (name) index_of(name);
    }
  }
}

size_t Rule::index_of(const char* name) {
  const auto index = info_.find(name);
  if (!index) throw std::logic_error(info_.name + ": the configuration's table has no hyper-parameter " + name);
  names_read_.insert(name);
  return *index;
}

bool Rule::keeps(size_t role, const Hyperparameters& hyper) const {
  const StateRole& state = roles_.at(role);
  if (state.unless_zero && hyper.get(state.unless_zero) == 0.0) return false;
  return state.only_at_zero == nullptr || hyper.get(state.only_at_zero) == 0.0;
}

void Rule::check_states(const Segment& segment, const Hyperparameters& hyper) const {
  const std::string what = name() + " step";
  const Tensor& master = segment.master;
  TORCH_CHECK_VALUE(hyper.optimizer() == &info_, what, ": got hyper-parameters of ",
                    hyper.optimizer() ? hyper.optimizer()->name : "no optimizer", ", expected ", name(), "'s");
  TORCH_CHECK_VALUE(master.defined() && master.dim() == 1, what, ": master must be a flat tensor of shape (N,)");
  const bool rounds = reach(hyper) == Reach::elementwise && numerics::is_half_width(master.scalar_type());
  at::ScalarType also = rounds ? master.scalar_type() : at::ScalarType::Undefined;
  check_type(what, "master", master, master, also);
  check_packed(segment, rounds);
  if (segment.low.defined()) also = at::ScalarType::Undefined;
  TORCH_CHECK_VALUE(!segment.rounding || needs_fp32_states(hyper).empty(), what, ": ", needs_fp32_states(hyper));
  if (segment.rounding && reach(hyper) == Reach::elementwise) also = at::kBFloat16;
  TORCH_CHECK_VALUE(segment.states.size() == roles_.size(), what, ": got ", segment.states.size(), " states, expected ",
                    roles_.size());
  for (size_t i = 0; i < roles_.size(); ++i) {
    const StateRole& role = roles_[i];
    const Tensor& state = segment.states[i];
    const char* decides = role.unless_zero ? role.unless_zero : role.only_at_zero;
    TORCH_CHECK_VALUE(keeps(i, hyper) || !state.defined(), what, ": ", decides, " is ", hyper.get(decides),
                      " but the state ", role.name, " is defined; expected a state exactly when ", decides, " is ",
                      role.unless_zero ? "not 0" : "0");
    if (keeps(i, hyper)) check_type(what, role.name, state, master, also);
  }
  TORCH_CHECK_VALUE(!rounds || !segment.param.defined(), what, ": param is defined beside a master of 16 bits, ",
                    "expected none: the master is the parameter");
  if (segment.param.defined()) {
    const auto type = segment.param.scalar_type();
    check_like_master(what, "param", segment.param, master);
    TORCH_CHECK_VALUE(numerics::is_half_width(type), what, ": param is ", type,
                      ", expected BFloat16 or Half; in fp32 training leave it undefined");
  }
}

void Rule::check_packed(const Segment& segment, bool takes_16_bits) const {
  if (!segment.low.defined()) return;
  const std::string what = name() + " step";
  const Tensor& master = segment.master;
  TORCH_CHECK_VALUE(takes_16_bits && master.scalar_type() == at::kBFloat16, what,
                    ": low is defined beside a master of ", master.scalar_type(),
                    ", expected one of BFloat16, and a step of each element by itself");
  check_like_master(what, "low", segment.low, master);
  TORCH_CHECK_VALUE(segment.low.scalar_type() == at::kShort, what, ": low is ", segment.low.scalar_type(),
                    ", expected Short");
  TORCH_CHECK_VALUE(segment.halfway != nullptr, what, ": a packed master needs the bits of what lies halfway");
}

void Rule::check(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  check_states(segment, hyper);
  const std::string what = name() + " step";
  check_gradient(what, segment.gradient, segment.master);
  TORCH_CHECK_VALUE(terms.step >= 1, what, ": step is ", terms.step, ", expected at least 1: steps are counted from 1");
  TORCH_CHECK_VALUE(segment.rows >= 1 && segment.master.numel() % segment.rows == 0, what, ": ", segment.rows,
                    " rows do not divide the parameter's ", segment.master.numel(), " elements");
}

void Rule::step(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  if (!segment.master.defined() || !segment.master.is_cpu()) {
    const auto update = detail::has_step_kernel(segment) ? kernel_update(hyper, terms) : std::nullopt;
    if (!update) return step_reference(segment, hyper, terms);
    check(segment, hyper, terms);
    if (!detail::takes_gradient(segment)) {
      Segment other = segment;
      other.gradient = detail::nearer_gradient(segment.gradient);
      return step(other, hyper, terms);
    }
    return detail::step_by_kernel(segment, terms, *update);
  }
  check(segment, hyper, terms);
  step_cpu(segment, hyper, terms);
}

/// A rule's `step_aten` moves masters and states only; the parameter follows here, alike for all.
void Rule::step_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  check(segment, hyper, terms);
  at::NoGradGuard no_grad;
  const Segment wide = widened(segment);
  step_aten(wide, hyper, terms);
  copy_master_back(wide.master, segment);
  copy_states_back(wide, segment, terms.step);
  if (segment.param.defined()) segment.param.copy_(segment.master);
}

Registration::Registration(const char* name, Make make) { registry().emplace(name, make); }

std::vector<std::string> registered_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : registry()) names.push_back(name);
  return names;
}

const std::vector<const Rule*>& all_rules() {
  static const auto* rules = new std::vector<const Rule*>(make_rules());  // engines may outlive statics
  return *rules;
}

const Rule& find_rule(std::string_view type) {
  const OptimizerInfo* info = find_optimizer(type);
  std::string names;
  for (const Rule* rule : all_rules()) {
    if (&rule->info() == info) return *rule;
    for (const std::string& name : rule->info().types) names += (names.empty() ? "" : ", ") + name;
  }
  throw ConfigError("optimizer: got \"" + std::string(type) + "\", expected one of " + names);
}

}  // namespace deeptide::optim
