// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Replays recorded operators.
#include "deferred/history.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "deferred/key.h"
#include "deferred/parts.h"
#include "deferred/traits.h"
#include "device/memory/idle_memory.h"
#include "device/memory/page_heap.h"
#include "device/torch_versions.h"

namespace deeptide::deferred {

using at::Storage;
using at::Tensor;
using c10::IValue;

namespace {

/// A heap of its own: in malloc's, the small records made meanwhile would keep each freed tensor's pages in use.
/// Never destroyed: tensors may outlive static destruction.
device::PageHeap& heap() {
  static auto* heap = new device::PageHeap(/*min_kept_bytes=*/0, &device::make_room);
  return *heap;
}

Storage allocate(size_t nbytes, c10::Device device) {
  if (!device.is_cpu()) {
    return at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions(at::kByte).device(device)).storage();
  }
  const auto wanted = static_cast<int64_t>(std::max<size_t>(nbytes, 1));
  void* data = nullptr;
  device::take_before_idle([&] { return (data = heap().allocate(wanted)) != nullptr; });
  TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "zero.Init: no memory for a tensor of ", nbytes, " bytes");
  const auto free = [](void* block) { heap().free(block); };
  return Storage(Storage::use_byte_size_t(), nbytes, at::DataPtr(data, data, free, at::kCPU), nullptr,
                 /*resizable=*/false);
}

Tensor tensor_in(const Storage& storage, const Geometry& geometry) {
  return at::empty({0}, at::TensorOptions(geometry.dtype).device(geometry.device))
      .set_(storage, geometry.offset, geometry.sizes, geometry.strides);
}

Storage copy_of(const Storage& storage) {
  Storage copy = allocate(storage.nbytes(), storage.device());
  if (storage.device().is_cpu()) {
    std::memcpy(copy.mutable_data(), storage.data(), storage.nbytes());
    return copy;
  }
  const Geometry bytes{at::kByte, {static_cast<int64_t>(storage.nbytes())}, {1}, 0, storage.nbytes(), storage.device()};
  tensor_in(copy, bytes).copy_(tensor_in(storage, bytes));
  return copy;
}

/// Sets a generator to a state for as long as it lives.
class GeneratorAt {
 public:
  explicit GeneratorAt(const Tensor& state) {
    if (!state.defined()) return;
    generator_ = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_state(state);
  }
  GeneratorAt(const GeneratorAt&) = delete;
  GeneratorAt& operator=(const GeneratorAt&) = delete;
  ~GeneratorAt() {
    if (!before_.defined()) return;
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }

 private:
  at::Generator generator_;
  Tensor before_;
};

/// A call's arguments with tensors in place of the absent ones.
torch::jit::Stack complete(const Operation& operation, const std::vector<Tensor>& tensors) {
  torch::jit::Stack stack = operation.arguments;
  std::unordered_map<int, std::vector<std::optional<Tensor>>> lists;
  for (size_t i = 0; i < operation.absent.size(); ++i) {
    const auto& [argument, item] = std::pair(operation.absent[i].argument, operation.absent[i].item);
    if (item < 0) {
      stack[argument] = tensors[i];
      continue;
    }
    auto& list = lists[argument];
    if (list.empty()) {
      for (const IValue& element : operation.arguments[argument].toListRef()) {
        list.push_back(element.isTensor() ? std::optional(element.toTensor()) : std::nullopt);
      }
    }
    list[item] = tensors[i];
  }
  for (auto& [argument, list] : lists) {
    if (operation.arguments[argument].isTensorList()) {
      std::vector<Tensor> plain;
      for (const auto& tensor : list) plain.push_back(tensor.value_or(Tensor()));
      stack[argument] = plain;
    } else {
      stack[argument] = list;
    }
  }
  return stack;
}

/// Runs the call with these tensors; leaves what it returns on the stack.
torch::jit::Stack run(const Operation& operation, const std::vector<Tensor>& tensors) {
  check_kept(operation);
  auto stack = complete(operation, tensors);
  const GeneratorAt generator(operation.generator_state);
  const int place = traits_of(operation.op).generator;
  if (operation.generator_state.defined() && place >= 0 && stack[place].isGenerator()) {
    at::Generator own = at::detail::createCPUGenerator();  // the program's may be elsewhere by now
    own.set_state(operation.generator_state);
    stack[place] = own;
  }
  const device::KeptArguments kept(stack);
  operation.op.callBoxed(stack);
  return stack;
}

/// The memory of a new result, in the order of elements that was recorded.
Storage storage_of(const Tensor& tensor, const Geometry& geometry) {
  const bool as_recorded = tensor.sizes() == geometry.sizes && tensor.strides() == geometry.strides &&
                           tensor.scalar_type() == geometry.dtype && tensor.storage_offset() == 0 &&
                           tensor.storage().nbytes() >= geometry.nbytes;
  if (as_recorded) return tensor.storage();
  Tensor ordered =
      at::empty_strided(geometry.sizes, geometry.strides, at::TensorOptions(geometry.dtype).device(geometry.device));
  ordered.copy_(tensor);
  return ordered.storage();
}

class Replay {
 public:
  explicit Replay(const std::vector<std::shared_ptr<Version>>& roots) {
    std::vector<const Version*> open;
    for (const auto& root : roots) {
      if (live_[root.get()].uses++ == 0) open.push_back(root.get());
    }
    std::unordered_set<const Operation*> known;
    while (!open.empty()) {
      const Operation* operation = open.back()->made_by.get();
      open.pop_back();
      if (!known.insert(operation).second) continue;
      operations_.push_back(operation);
      for (const Absent& absent : operation->absent) {
        if (absent.before && live_[absent.before.get()].uses++ == 0) open.push_back(absent.before.get());
      }
    }
    std::sort(operations_.begin(), operations_.end(), [](auto* a, auto* b) { return a->number < b->number; });
  }

  void run_all() {
    for (const Operation* operation : operations_) run_one(*operation);
  }
  Storage take(const Version& version) { return live_.at(&version).storage; }

 private:
  struct Live {
    Storage storage;
    int uses = 0;  // by operators still to run, and by who asked for it
  };

  /// The memories of a call's absent arguments. One that is written and wanted afterwards as well is copied.
  std::vector<Storage> memories(const Operation& operation) {
    std::unordered_map<const void*, int> own_uses;
    std::unordered_set<const void*> written;
    for (const Absent& absent : operation.absent) {
      if (absent.before) ++own_uses[absent.before.get()];
      if (absent.written && absent.before) written.insert(absent.before.get());
    }
    std::unordered_map<const void*, Storage> chosen;
    std::vector<Storage> storages;
    for (const Absent& absent : operation.absent) {
      const void* key = absent.before ? static_cast<const void*>(absent.before.get()) : &absent;
      auto [it, fresh] = chosen.try_emplace(key);
      if (fresh && !absent.before) it->second = allocate(absent.geometry.nbytes, absent.geometry.device);
      if (fresh && absent.before) {
        const Live& live = live_.at(absent.before.get());
        const bool wanted_later = live.uses > own_uses[key];
        it->second = written.count(key) > 0 && wanted_later ? copy_of(live.storage) : live.storage;
      }
      storages.push_back(it->second);
    }
    return storages;
  }

  void run_one(const Operation& operation) {
    const auto storages = memories(operation);
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < storages.size(); ++i) {
      tensors.push_back(tensor_in(storages[i], operation.absent[i].geometry));
    }
    const auto returned = run(operation, tensors);
    for (const Absent& absent : operation.absent) {
      if (!absent.before) continue;
      if (--live_.at(absent.before.get()).uses == 0) live_.erase(absent.before.get());
    }
    for (const Result& result : operation.results) {
      const auto version = result.version.lock();
      const auto live = live_.find(version.get());
      if (!version || live == live_.end()) continue;
      live->second.storage = result.absent >= 0 ? storages[result.absent] : new_storage(returned, result);
    }
  }

  static Storage new_storage(const torch::jit::Stack& returned, const Result& result) {
    const IValue& value = returned.at(result.place);
    return storage_of(result.item < 0 ? value.toTensor() : value.toListRef()[result.item].toTensor(), result.geometry);
  }

  std::unordered_map<const Version*, Live> live_;
  std::vector<const Operation*> operations_;
};

}  // namespace

void check_kept(const Operation& operation) {
  for (const auto& [tensor, version] : operation.kept) {
    TORCH_CHECK_VALUE(tensor.is_inference() || tensor._version() == version, "zero.Init: a tensor of shape ",
                      tensor.sizes(), " that ", operation.op.schema().name(),
                      " read while the model was built has changed since. Change it after initialize, or give the "
                      "model a copy.");
  }
}

// A memory that is written row by row has a long history: without the queue each version would free the one before it
// from within its own destructor.
Version::~Version() {
  thread_local std::vector<std::shared_ptr<Operation>>* waiting = nullptr;
  if (waiting != nullptr) {
    waiting->push_back(std::move(made_by));
    return;
  }
  std::vector<std::shared_ptr<Operation>> queue;
  waiting = &queue;
  queue.push_back(std::move(made_by));
  while (!queue.empty()) {
    const auto operation = std::move(queue.back());
    queue.pop_back();
  }
  waiting = nullptr;
}

Tensor tensor_of(Geometry geometry) {
  geometry.nbytes = at::detail::computeStorageNbytes(geometry.sizes, geometry.strides, c10::elementSize(geometry.dtype),
                                                     geometry.offset);
  return tensor_in(allocate(geometry.nbytes, geometry.device), geometry);
}

void release_idle_memory() { heap().release_idle(); }

Geometry geometry_of(const Tensor& tensor) {
  return {tensor.scalar_type(),    tensor.sizes().vec(),      tensor.strides().vec(),
          tensor.storage_offset(), tensor.storage().nbytes(), tensor.device()};
}

std::vector<Storage> replay(const std::vector<std::shared_ptr<Version>>& versions) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  const at::NoGradGuard no_grad;
  Replay replay(versions);
  replay.run_all();
  std::vector<Storage> storages;
  for (const auto& version : versions) storages.push_back(replay.take(*version));
  return storages;
}

void draw(const Operation& operation) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  const at::NoGradGuard no_grad;
  if (draw_in_parts(operation)) return;
  std::vector<Tensor> tensors;
  for (const Absent& absent : operation.absent) {
    // How much is drawn depends on shapes, not on what the written tensor held.
    const bool read = absent.before && !absent.written;
    tensors.push_back(
        tensor_in(read ? replay({absent.before}).front() : allocate(absent.geometry.nbytes, absent.geometry.device),
                  absent.geometry));
  }
  auto stack = complete(operation, tensors);
  const device::KeptArguments kept(stack);
  operation.op.callBoxed(stack);
}

}  // namespace deeptide::deferred
