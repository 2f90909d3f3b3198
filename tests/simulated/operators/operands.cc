// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes twins by the second mapping of a block.
#include "simulated/operators/operands.h"

#include <c10/core/InferenceMode.h>

namespace deeptide::simulated {

using at::Tensor;
using c10::DispatchKey;
using c10::Storage;

namespace {

/// Returns the tensor's geometry over another storage.
Tensor over(Storage storage, const Tensor& tensor, DispatchKey key) {
  const c10::InferenceMode normal(false);  // the stream's thread knows no modes
  Tensor twin = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* const impl = twin.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return twin;
}

Storage storage_of(c10::DataPtr data, size_t bytes, c10::Allocator* allocator) {
  return {Storage::use_byte_size_t(), bytes, std::move(data), allocator, allocator != nullptr};
}

}  // namespace

std::pair<size_t, size_t> span(const Tensor& tensor) {
  const auto begin = static_cast<size_t>(tensor.storage_offset());
  size_t last = begin;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return {0, 0};
    last += static_cast<size_t>((tensor.size(d) - 1) * tensor.stride(d));
  }
  return {begin * tensor.itemsize(), (last + 1) * tensor.itemsize()};
}

Tensor Operands::cpu(const Tensor& tensor, bool write) {
  const auto* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto* const address = static_cast<const char*>(storage->data());
  const BlockRef block = Machine::instance().find(address);
  TORCH_CHECK(block || storage->nbytes() == 0, "simulated device: a tensor of memory that is not the device's");
  const auto [begin, end] = span(tensor);
  const size_t offset = block ? static_cast<size_t>(address - block->shown) : 0;
  if (block && begin < end) uses_.push_back({block, offset + begin, offset + end, write});
  Storage& twin = cpu_[storage];
  if (!twin.unsafeGetStorageImpl()) {
    char* const real = block ? block->real + offset : nullptr;
    twin = storage_of(c10::DataPtr(real, c10::kCPU), storage->nbytes(), nullptr);
  }
  return over(twin, tensor, DispatchKey::CPU);
}

Tensor Operands::meta(const Tensor& tensor) {
  const auto* const storage = tensor.storage().unsafeGetStorageImpl();
  Storage& twin = meta_[storage];
  if (!twin.unsafeGetStorageImpl()) {
    twin = storage_of(c10::DataPtr(nullptr, c10::kMeta), storage->nbytes(), c10::GetAllocator(c10::kMeta));
  }
  return over(twin, tensor, DispatchKey::Meta);
}

void Operands::run(const std::string& name, std::function<void()> task, HostWait wait, const Cost& cost) {
  run_on(current_stream(), name, std::move(task), wait, cost);
}

void Operands::run_on(int stream, const std::string& name, std::function<void()> task, HostWait wait,
                      const Cost& cost) {
  Cost actual = cost;
  if (cost.engine == Engine::compute) {  // bound by the memory that it reads and writes
    for (const Use& use : uses_) actual.bytes += use.end - use.begin;
  }
  if (wait == HostWait::ordered && Machine::instance().warns_of_waits()) {
    TORCH_WARN("called a synchronizing simulated operation: ", name);
  }
  with_torch_errors([&] {
    Machine::instance().enqueue(stream, {name, std::move(uses_), std::move(task), actual}, wait);
  });
  uses_.clear();
}

}  // namespace deeptide::simulated
