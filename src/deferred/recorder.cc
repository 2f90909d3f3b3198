// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides what is recorded, what runs at once, and what gives up its deferral.
#include "deferred/recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "base/log.h"
#include "deferred/history.h"
#include "deferred/memory.h"
#include "deferred/traits.h"
#include "device/memory/idle_memory.h"
#include "device/torch_versions.h"

namespace deeptide::deferred {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

thread_local int64_t min_bytes = 0;  // 0: no scope
std::atomic<int64_t> num_operations{0};

bool in_scope() { return min_bytes > 0 && c10::impl::tls_is_dispatch_key_included(kKey); }

/// The arguments of a call as the schema and the recorder see them.
struct Call {
  Call(const c10::OperatorHandle& handle, Stack& all)
      : op(handle),
        traits(traits_of(handle)),
        stack(all),
        arguments(torch::jit::last(all, handle.schema().arguments().size())) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool write = traits.writes_argument(i);
      for_each_tensor(arguments[i], [&](int item, const Tensor& tensor) {
        if (is_deferred(tensor)) {
          places.emplace_back(static_cast<int>(i), item);
          deferred.push_back(tensor);
          written_deferred += write ? 1 : 0;
        } else {
          foreign_key = foreign_key || has_key(tensor);
          written_real += write ? 1 : 0;
        }
      });
    }
  }

  const c10::OperatorHandle& op;
  const Traits& traits;
  Stack& stack;
  c10::ArrayRef<IValue> arguments;
  std::vector<std::pair<int, int>> places;  // argument and item of each deferred tensor
  std::vector<Tensor> deferred;
  int written_deferred = 0;
  int written_real = 0;
  bool foreign_key = false;  // a sharded parameter takes part
};

/// Puts tensors in the places of the deferred ones.
void replace(Call& call, const std::vector<Tensor>& tensors) {
  const size_t first = call.stack.size() - call.op.schema().arguments().size();
  for (size_t k = 0; k < tensors.size(); ++k) {
    const auto [argument, item] = call.places[k];
    IValue& value = call.stack[first + argument];
    if (item < 0) {
      value = tensors[k];
    } else {
      auto list = value.toList();
      auto copy = list.copy();  // the caller's list keeps the deferred ones
      copy.set(item, tensors[k]);
      value = copy;
    }
  }
}

/// Runs the operator below the gate; with a sharded parameter among its arguments the gate has to.
bool run_below(const Call& call, c10::DispatchKeySet below) {
  if (call.foreign_key) return false;
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  const device::KeptArguments kept(call.stack);
  call.op.redispatchBoxed(below, &call.stack);
  return true;
}

/// Tensors like the deferred ones, of which nothing is written: the system gives them no pages.
std::vector<Tensor> shapes_of(const std::vector<Tensor>& deferred) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  std::vector<Tensor> shapes;
  for (const Tensor& tensor : deferred)
    shapes.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
  return shapes;
}

/// Computes at once, with the values of what is deferred.
bool run_now(Call& call, c10::DispatchKeySet below) {
  if (!call.deferred.empty())
    replace(call, call.traits.reads_shape ? shapes_of(call.deferred) : values_of(call.deferred));
  return run_below(call, below);
}

/// For operators that cannot be recorded: what they use becomes an ordinary tensor from here on.
bool give_up(Call& call, c10::DispatchKeySet below) {
  int64_t bytes = 0;
  for (const Tensor& tensor : call.deferred) {
    bytes += static_cast<int64_t>(is_deferred(tensor) ? tensor.storage().nbytes() : 0);
    materialize(tensor);
  }
  log(LogLevel::warning, "zero.Init cannot record " + call.op.schema().name() +
                             ": it ran at once, and what it uses took " + std::to_string(bytes) + " bytes");
  return run_below(call, below);
}

Tensor on_meta(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

/// Infers the operator's results on the meta device; returns false if it cannot run there.
bool infer(const Call& call, Stack& results) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  const at::NoGradGuard no_grad;
  results.assign(call.arguments.begin(), call.arguments.end());
  try {
    for (IValue& value : results) {
      if (value.isTensor() && value.toTensor().defined()) {
        value = on_meta(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? on_meta(tensor) : tensor);
        value = list;
      } else if (value.isGenerator()) {
        value = IValue();
      }
    }
    if (call.traits.device >= 0) results[call.traits.device] = c10::Device(at::kMeta);
    const device::KeptArguments kept(results);
    call.op.callBoxed(results);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

/// Whether results of this kind may be deferred, and how many bytes they take.
bool is_deferrable(const Stack& results, int64_t& bytes) {
  bytes = 0;
  bool deferrable = !results.empty();
  for (const IValue& result : results) {
    deferrable = deferrable && (result.isTensor() || result.isTensorList());
    for_each_tensor(result, [&](int, const Tensor& tensor) {
      deferrable = deferrable && tensor.layout() == at::kStrided && c10::isFloatingType(tensor.scalar_type()) &&
                   tensor.storage_offset() == 0;
      if (deferrable) bytes += static_cast<int64_t>(tensor.storage().nbytes());
    });
  }
  return deferrable;
}

/// The device of the operator's results: as it is told, else its tensors'.
c10::Device device_of_results(const Call& call) {
  if (call.traits.device >= 0 && !call.arguments[call.traits.device].isNone()) {
    const c10::Device device = call.arguments[call.traits.device].toDevice();
    const bool is_current = !device.is_cpu() && !device.is_meta() && !device.has_index();
    return is_current ? c10::impl::VirtualGuardImpl(device.type()).getDevice() : device;
  }
  c10::Device device = at::kCPU;
  for (const IValue& argument : call.arguments) {
    for_each_tensor(argument, [&](int, const Tensor& tensor) {
      if (!tensor.device().is_cpu()) device = tensor.device();
    });
  }
  return device;
}

/// Records what is made on a CPU, and copies of what is deferred wherever they go: a model that moves to a device would
/// be whole there.
bool is_deferrable_on(c10::Device device, const Call& call) {
  return device.is_cpu() || (call.traits.copies && !call.deferred.empty() && !device.is_meta());
}

bool covers_its_memory(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

/// Small tensors are copied, for programs reuse them; large ones are watched.
void keep_arguments(Operation& operation) {
  const auto keep = [&](const Tensor& tensor) -> Tensor {
    if (static_cast<int64_t>(tensor.nbytes()) <= kMinBytes) return tensor.detach().clone();
    operation.kept.emplace_back(tensor, tensor.is_inference() ? 0 : tensor._version());
    return tensor.detach();
  };
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  for (IValue& value : operation.arguments) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = is_deferred(value.toTensor()) ? Tensor() : keep(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(!tensor.defined() || is_deferred(tensor) ? Tensor() : keep(tensor));
      }
      value = list;
    }
  }
}

at::Generator default_generator() { return at::detail::getDefaultCPUGenerator(); }

/// torch makes what an operator needs at its first call, under locks of its own, which a child that is forked meanwhile
/// would wait for, too. So what most initial values need is there before another thread may build.
void draw_once() {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  const at::NoGradGuard no_grad;
  const at::Generator own = at::detail::createCPUGenerator();  // the program's does not move
  at::empty({2}).uniform_(0.0, 1.0, own).normal_(0.0, 1.0, own).zero_();
}

/// Threads that build a model hold the generator's lock most of the time: a child forked meanwhile, such as a loader's
/// worker, would wait for it for ever. Who holds it allocates, so a fork takes the heap's lock after it: handlers run
/// from the one registered last.
void keep_generator_for_children() {
  static const int watched = [] {
    draw_once();
    device::watch_forks();
    return ::pthread_atfork([] { default_generator().mutex().lock(); }, [] { default_generator().mutex().unlock(); },
                            [] { default_generator().mutex().unlock(); });
  }();
  static_cast<void>(watched);
}

/// The state of the generator that the call will draw from. Undefined if it is not the CPU's, as for a device's
/// tensors.
Tensor generator_state(const Call& call) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  if (call.traits.generator >= 0 && call.arguments[call.traits.generator].isGenerator()) {
    generator = call.arguments[call.traits.generator].toGenerator();
  }
  const auto on_cpu = [](const Tensor& tensor) { return tensor.is_cpu(); };
  if (generator.device() != at::kCPU || !std::all_of(call.deferred.begin(), call.deferred.end(), on_cpu)) return {};
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

std::shared_ptr<Operation> begin_operation(const Call& call) {
  auto operation = std::make_shared<Operation>(call.op);
  operation->arguments = call.arguments.vec();
  operation->number = num_operations.fetch_add(1, std::memory_order_relaxed);
  for (size_t k = 0; k < call.deferred.size(); ++k) {
    const Tensor& tensor = call.deferred[k];
    const auto [argument, item] = call.places[k];
    Absent absent;
    absent.argument = argument;
    absent.item = item;
    absent.geometry = geometry_of(tensor);
    absent.written = call.traits.writes_argument(argument);
    if (!(call.traits.overwrites && argument == 0 && covers_its_memory(tensor))) absent.before = memory_of(tensor)->now;
    operation->absent.push_back(std::move(absent));
  }
  keep_arguments(*operation);
  return operation;
}

void finish_operation(const Call& call, Operation& operation) {
  if (!call.traits.random) return;
  operation.generator_state = generator_state(call);
  draw(operation);
}

/// Gives back what an operator in place returns: its written arguments.
void return_arguments(const Call& call) {
  std::vector<IValue> returned;
  for (int argument : call.traits.returns_argument) returned.push_back(call.arguments[argument]);
  torch::jit::drop(call.stack, call.arguments.size());
  call.stack.insert(call.stack.end(), returned.begin(), returned.end());
}

void record_in_place(const Call& call) {
  auto operation = begin_operation(call);
  finish_operation(call, *operation);
  for (size_t k = 0; k < call.deferred.size(); ++k) {
    const Absent& absent = operation->absent[k];
    if (!absent.written) continue;
    auto version = std::make_shared<Version>(operation, absent.geometry.nbytes);
    operation->results.push_back({version, static_cast<int>(k), -1, -1, absent.geometry});
    memory_of(call.deferred[k])->now = std::move(version);
    if (!call.deferred[k].is_inference()) call.deferred[k].unsafeGetTensorImpl()->bump_version();
  }
  return_arguments(call);
}

void record_new(const Call& call, const Stack& shapes, c10::Device device) {
  auto operation = begin_operation(call);
  const int dtype = call.traits.dtype;
  if (dtype >= 0 && operation->arguments[dtype].isNone() && call.deferred.empty() && shapes.front().isTensor()) {
    operation->arguments[dtype] = shapes.front().toTensor().scalar_type();  // not the default of a later day
  }
  finish_operation(call, *operation);
  const auto make = [&](const Tensor& shape, int place, int item) {
    Geometry geometry = geometry_of(shape);
    geometry.device = device;
    auto version = std::make_shared<Version>(operation, geometry.nbytes);
    operation->results.push_back({version, -1, place, item, geometry});
    return make_tensor(geometry, std::move(version));
  };
  Stack returned;
  for (int place = 0; place < static_cast<int>(shapes.size()); ++place) {
    if (shapes[place].isTensor()) {
      returned.emplace_back(make(shapes[place].toTensor(), place, -1));
      continue;
    }
    std::vector<Tensor> list;
    for (const Tensor& shape : shapes[place].toTensorVector()) {
      list.push_back(make(shape, place, static_cast<int>(list.size())));
    }
    returned.emplace_back(list);
  }
  torch::jit::drop(call.stack, call.arguments.size());
  call.stack.insert(call.stack.end(), returned.begin(), returned.end());
}

bool write(Call& call, c10::DispatchKeySet below) {
  if (call.written_deferred == 0) return run_now(call, below);
  const auto& returns = call.traits.returns_argument;
  const bool only_writes = std::all_of(returns.begin(), returns.end(), [](int argument) { return argument >= 0; });
  const bool draws_elsewhere = call.traits.random && !generator_state(call).defined();
  if (call.written_real > 0 || !only_writes || draws_elsewhere || call.foreign_key) return give_up(call, below);
  record_in_place(call);
  return true;
}

/// torch's own way touches the memory.
void set_memory(const Call& call) {
  const Tensor self = call.arguments[0].toTensor(), source = call.arguments[1].toTensor();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  set_key(self, is_deferred(source));
  return_arguments(call);
}

void check_no_gradient(const Call& call) {
  if (!at::GradMode::is_enabled()) return;
  for (const Tensor& tensor : call.deferred) {
    TORCH_CHECK_VALUE(!tensor.requires_grad(), "deeptide: ", call.op.schema().name(),
                      " was given a parameter that was built under zero.Init and has no memory before initialize: its "
                      "gradient would be lost. Call deeptide.initialize first; under torch.no_grad() it may be read.");
  }
}

bool make_new(Call& call, c10::DispatchKeySet below) {
  if (!in_scope()) check_no_gradient(call);
  const c10::Device device = device_of_results(call);
  const bool may_defer = (in_scope() || call.traits.copies) && is_deferrable_on(device, call) && !call.foreign_key &&
                         call.traits.makes_tensors && !(call.traits.random && !generator_state(call).defined());
  if (!may_defer) return run_now(call, below);
  Stack shapes;
  int64_t bytes = 0;
  const int64_t least = in_scope() ? min_bytes : kMinBytes;
  if (!infer(call, shapes) || !is_deferrable(shapes, bytes) || bytes < least) return run_now(call, below);
  record_new(call, shapes, device);
  return true;
}

}  // namespace

Scope::Scope(int64_t least) : min_bytes_before_(min_bytes) {
  keep_generator_for_children();
  min_bytes = std::max<int64_t>(least, 1);
}
Scope::~Scope() {
  min_bytes = min_bytes_before_;
  release_idle_memory();
}

bool record(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack* stack) {
  if (!in_scope() && num_memories() == 0) return false;
  Call call(op, *stack);
  if (!in_scope() && call.deferred.empty()) return false;
  if (call.traits.collective) return call.deferred.empty() ? false : give_up(call, below);
  if (call.traits.composite) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    return true;
  }
  if (call.traits.sets_memory && !call.foreign_key && !call.deferred.empty()) {
    set_memory(call);
    return true;
  }
  if (call.traits.views_only || call.traits.changes_shape) return run_below(call, below);
  if (call.traits.writes != 0) return write(call, below);
  return make_new(call, below);
}

}  // namespace deeptide::deferred
