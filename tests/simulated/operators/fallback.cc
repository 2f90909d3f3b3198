// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Every other operator: results are allocated from their shapes, and the CPU's kernel becomes a task of the stream.
#include <ATen/EmptyTensor.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/as_strided_native.h>
#include <torch/library.h>

#include <set>

#include "device/torch_versions.h"
#include "simulated/operators/call.h"

namespace deeptide::simulated {

using at::Tensor;
using c10::IValue;

namespace {

constexpr c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

Tensor fresh_like(const Tensor& shape) {
  if (!shape.defined()) return shape;
  return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type());
}

IValue fresh_like(const IValue& shape) {
  if (shape.isTensor()) return fresh_like(shape.toTensor());
  if (!shape.isTensorList()) return shape;
  c10::List<Tensor> list;
  for (const Tensor& tensor : shape.toTensorVector()) list.push_back(fresh_like(tensor));
  return list;
}

/// The CPU's twins of new results.
IValue writable(Operands& operands, const IValue& value) {
  const auto twin = [&](const Tensor& tensor) { return tensor.defined() ? operands.cpu(tensor, true) : tensor; };
  if (value.isTensor()) return twin(value.toTensor());
  if (!value.isTensorList()) return {};
  c10::List<Tensor> list;
  for (const Tensor& tensor : value.toTensorVector()) list.push_back(twin(tensor));
  return list;
}

void copy_result(const std::string& name, const Tensor& from, const Tensor& to) {
  if (!to.defined()) return;
  TORCH_CHECK(from.defined() && from.sizes() == to.sizes() && from.dtype() == to.dtype(), "simulated device: ", name,
              ": its shape function promised ", to.dtype(), to.sizes(), ", not what the CPU's kernel made");
  to.copy_(from);
}

void copy_result(const std::string& name, const IValue& from, const IValue& to) {
  if (to.isTensor()) copy_result(name, from.toTensor(), to.toTensor());
  if (!to.isTensorList()) return;
  const auto source = from.toTensorVector(), target = to.toTensorVector();
  for (size_t i = 0; i < target.size(); ++i) copy_result(name, source[i], target[i]);
}

/// Shapes that depend on values: runs, waits, then copies what came out.
void run_and_wait(const Call& call, Stack& stack) {
  const auto results = std::make_shared<Stack>();
  Operands operands;
  Stack arguments = call.cpu_arguments(operands);
  operands.run(
      call.name(),
      [op = call.op(), arguments = std::move(arguments), results]() mutable {
        *results = std::move(arguments);
        const device::KeptArguments kept(*results);
        op.redispatchBoxed(kCpuKeys, results.get());
      },
      HostWait::ordered);
  for (size_t i = 0; i < call.num_results(); ++i) {
    const IValue* const aliased = call.aliased_argument(i);
    if (aliased != nullptr && call.writes_result(i)) {
      stack.push_back(*aliased);
      continue;
    }
    IValue result = fresh_like((*results)[i]);
    Operands written;
    const IValue to = writable(written, result);
    if (!written.empty()) {
      written.run(call.name(), [name = call.name(), from = (*results)[i], to] { copy_result(name, from, to); });
    }
    stack.push_back(std::move(result));
  }
}

/// Gives arguments that the operator resized (out=) their new shapes.
void resize_written(const Call& call, const Shapes& shapes) {
  for (size_t i = 0; i < call.arguments().size(); ++i) {
    const IValue& argument = call.arguments()[i];
    if (!call.writes_argument(i) || !argument.isTensor() || !on_device(argument.toTensor())) continue;
    const Tensor& own = argument.toTensor();
    const Tensor& shape = shapes.arguments[i].toTensor();
    if (own.sizes() == shape.sizes() && own.strides() == shape.strides()) continue;
    const size_t needed = span(shape).second;
    if (needed > own.storage().nbytes()) resize_storage(own.storage(), needed);
    own.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
  }
}

/// Makes result `i`. `computed`: set unless it is a view, for which no kernel runs.
IValue make_result(const Call& call, const Shapes& shapes, size_t i, bool& computed) {
  const IValue* const aliased = call.aliased_argument(i);
  if (aliased != nullptr && !call.writes_result(i) && aliased->isTensor() && shapes.results[i].isTensor()) {
    const Tensor& shape = shapes.results[i].toTensor();
    return at::native::as_strided_tensorimpl(aliased->toTensor(), shape.sizes(), shape.strides(),
                                             shape.storage_offset());
  }
  computed = true;
  return aliased != nullptr && call.writes_result(i) ? *aliased : fresh_like(shapes.results[i]);
}

/// Acts like a library for matrix products, whose handles belong to threads and whose workspaces belong to streams.
void take_workspace(const Call& call) {
  static const std::set<std::string> kProducts{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  if (kProducts.contains(call.name().substr(0, call.name().find('.')))) {
    with_torch_errors([] { Machine::instance().take_workspace(current_stream()); });
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Call call(op, *stack);
  take_workspace(call);
  const Shapes shapes = shapes_of(call);
  if (!shapes.known) return run_and_wait(call, *stack);
  resize_written(call, shapes);
  bool computed = call.num_results() == 0;
  Stack made;
  for (size_t i = 0; i < call.num_results(); ++i) made.push_back(make_result(call, shapes, i, computed));
  if (computed) {
    Operands operands;
    Stack arguments = call.cpu_arguments(operands), targets;
    for (size_t i = 0; i < made.size(); ++i) {
      targets.push_back(call.aliased_argument(i) != nullptr ? IValue() : writable(operands, made[i]));
    }
    const auto run = [op, name = call.name(), arguments = std::move(arguments),
                      targets = std::move(targets)]() mutable {
      const device::KeptArguments kept(arguments);
      op.redispatchBoxed(kCpuKeys, &arguments);
      for (size_t i = 0; i < targets.size(); ++i) copy_result(name, arguments[i], targets[i]);
      arguments.clear();
    };
    // One generator, whose numbers are drawn in the host's order.
    operands.run(call.name(), run, call.is_random() ? HostWait::done : HostWait::no);
  }
  for (IValue& result : made) stack->push_back(std::move(result));
}

// Operators with a kernel for the CPU and a composite one, which would be taken before the fallback and rounds
// differently.
constexpr const char* kNotComposite[] = {"native_layer_norm",
                                         "native_group_norm",
                                         "silu_backward",
                                         "mish_backward",
                                         "addr",
                                         "addr.out",
                                         "_stack",
                                         "_stack.out",
                                         "native_channel_shuffle",
                                         "all.dims",
                                         "all.dims_out",
                                         "any.dims",
                                         "any.dims_out",
                                         "linalg__powsum"};

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : kNotComposite) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// torch 2.9 has these for autograd on its own devices only.
TORCH_LIBRARY_IMPL(c10d, AutogradPrivateUse1, m) {
  for (const char* name : {"barrier", "_allgather_base_"}) m.impl(name, torch::CppFunction::makeFallthrough());
}

}  // namespace deeptide::simulated
