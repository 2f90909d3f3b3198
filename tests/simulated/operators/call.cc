// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Replaces the tensors among an operator's arguments.
#include "simulated/operators/call.h"

namespace deeptide::simulated {

using at::Tensor;
using c10::IValue;

Call::Call(const c10::OperatorHandle& op, Stack& stack)
    : op_(op),
      parameters_(op.schema().arguments()),
      results_(op.schema().returns()),
      name_(c10::toString(op.operator_name())),
      arguments_(stack.end() - static_cast<int64_t>(parameters_.size()), stack.end()) {
  stack.resize(stack.size() - parameters_.size());
}

bool Call::is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

const IValue* Call::aliased_argument(size_t result) const {
  const auto* const alias = results_[result].alias_info();
  if (alias == nullptr) return nullptr;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].alias_info() != nullptr && *parameters_[i].alias_info() == *alias) return &arguments_[i];
  }
  return nullptr;
}

bool Call::is_random() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.name() == "generator"; });
}

Stack Call::map(const Twin& twin, c10::Device device) const {
  Stack mapped;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const IValue& argument = arguments_[i];
    const bool write = writes_argument(i);
    const auto twin_of = [&](const Tensor& tensor) { return tensor.defined() ? twin(tensor, write) : tensor; };
    if (argument.isTensor()) {
      mapped.emplace_back(twin_of(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : argument.toTensorVector()) list.push_back(twin_of(tensor));
      mapped.emplace_back(std::move(list));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : argument.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<Tensor>(twin_of(*tensor)) : tensor);
      }
      mapped.emplace_back(std::move(list));
    } else if (argument.isDevice()) {
      mapped.emplace_back(device);
    } else if (parameters_[i].name() == "generator" && !argument.isGenerator()) {
      mapped.emplace_back(default_generator());
    } else {
      mapped.push_back(argument);
    }
  }
  return mapped;
}

/// A tensor of the host among device tensors: a number's value now, or indices.
Tensor Call::host_argument(const Tensor& tensor, bool write) const {
  const bool indices = !write && name_.find("index") != std::string::npos;
  TORCH_CHECK(tensor.dim() == 0 || indices, name_, ": expected all tensors on the simulated device");
  Tensor value = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return value;
}

Stack Call::cpu_arguments(Operands& operands) const {
  return map(
      [&](const Tensor& tensor, bool write) {
        return on_device(tensor) || is_pinned(tensor) ? operands.cpu(tensor, write) : host_argument(tensor, write);
      },
      c10::kCPU);
}

/// Wrapped numbers stay on the CPU: shape functions in Python read their values.
Stack Call::meta_arguments(Operands& operands) const {
  return map(
      [&](const Tensor& tensor, bool) {
        const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.is_cpu();
        return number ? tensor : operands.meta(tensor);
      },
      c10::kMeta);
}

}  // namespace deeptide::simulated
