// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Storages that throw on direct access.
#include "deferred/memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

#include "deferred/key.h"
#include "device/torch_versions.h"

namespace deeptide::deferred {

using at::DataPtr;
using at::Tensor;
using c10::StorageImpl;

namespace {

std::atomic<int64_t> num_alive{0};

constexpr const char* kDirectAccess =
    "deeptide: a tensor that was made under zero.Init was accessed directly: numpy(), torch.save and the like bypass "
    "the operators that know its values. Take a copy outside of zero.Init with tensor.detach().clone(), or build this "
    "part of the model outside.";

/// Ranges that no processor can address, so whoever reads there fails at once.
uint64_t take_addresses(size_t nbytes) {
  constexpr uint64_t kFirst = uint64_t{1} << 60;
  constexpr uint64_t kAlignment_bytes = 64;
  static std::atomic<uint64_t> next{kFirst};
  return next.fetch_add((nbytes / kAlignment_bytes + 1) * kAlignment_bytes);
}

void delete_memory(void* context) { delete static_cast<Memory*>(context); }

Memory* memory_at(const at::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().cast_context<Memory>(&delete_memory);
}

void give_data(StorageImpl& storage, DataPtr data) {
  device::allow_data_access(storage);
  storage.set_data_ptr_noswap(std::move(data));  // deletes the Memory
}

}  // namespace

Memory::Memory(std::shared_ptr<Version> first) : now(std::move(first)), address(take_addresses(now->nbytes)) {
  ++num_alive;
}
Memory::~Memory() { --num_alive; }

int64_t num_memories() { return num_alive.load(std::memory_order_relaxed); }

Tensor make_tensor(const Geometry& geometry, std::shared_ptr<Version> version) {
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), geometry.nbytes,
      DataPtr(nullptr, new Memory(std::move(version)), &delete_memory, geometry.device), nullptr, /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kDirectAccess);
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  Tensor tensor = at::empty({0}, at::TensorOptions(geometry.dtype).device(geometry.device));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  set_key(tensor, true);
  return tensor;
}

Memory* memory_of(const Tensor& tensor) {
  if (num_memories() == 0 || !has_key(tensor) || !tensor.has_storage()) return nullptr;
  return memory_at(tensor.storage());
}

uint64_t address_of(const Tensor& tensor) {
  const Memory* memory = memory_of(tensor);
  return memory == nullptr ? 0
                           : memory->address + static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size();
}

uint64_t address_of(const at::Storage& storage) {
  const Memory* memory = num_memories() == 0 ? nullptr : memory_at(storage);
  return memory == nullptr ? 0 : memory->address;
}

void materialize(const Tensor& tensor) {
  Memory* memory = memory_of(tensor);
  if (memory == nullptr) return;
  const auto values = replay({memory->now}).front();
  give_data(*tensor.storage().unsafeGetStorageImpl(),
            std::move(values.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  set_key(tensor, false);
}

Tensor source_of(const Tensor& tensor) {
  const Memory* memory = memory_of(tensor);
  const Operation* made_by = memory == nullptr ? nullptr : memory->now->made_by.get();
  if (made_by == nullptr || made_by->op.operator_name() != c10::OperatorName("aten::copy_", "")) return {};
  const Absent& target = made_by->absent.front();
  const Tensor source = made_by->arguments[1].isTensor() ? made_by->arguments[1].toTensor() : Tensor();
  const bool is_whole = target.argument == 0 && !target.before && target.geometry.sizes == tensor.sizes() &&
                        target.geometry.strides == tensor.strides() && tensor.is_contiguous();
  if (!is_whole || !source.defined() || !source.is_cpu() || source.sizes() != tensor.sizes()) return {};
  for (const auto& [kept, version] : made_by->kept) {
    if (!kept.is_inference() && kept._version() != version) return {};
  }
  return source;
}

std::vector<Tensor> values_of(const std::vector<Tensor>& tensors) {
  std::vector<std::shared_ptr<Version>> versions;
  for (const Tensor& tensor : tensors) versions.push_back(memory_of(tensor)->now);
  const auto storages = replay(versions);
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  std::vector<Tensor> values;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    values.push_back(at::empty({0}, at::TensorOptions(tensor.scalar_type()).device(tensor.device()))
                         .set_(storages[i], tensor.storage_offset(), tensor.sizes(), tensor.strides()));
  }
  return values;
}

Tensor values_as(const Tensor& tensor, c10::ScalarType dtype) {
  Tensor values = values_of({tensor}).front();
  if (values.scalar_type() == dtype) return values;
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  return tensor_of({dtype, tensor.sizes().vec(), tensor.strides().vec(), 0, 0, tensor.device()}).copy_(values);
}

}  // namespace deeptide::deferred
