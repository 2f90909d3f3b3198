// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Operators about memory: copies, factories, views and storages.
#include <ATen/EmptyTensor.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "simulated/operators/operands.h"

namespace deeptide::simulated {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using c10::SymIntArrayRef;

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

/// The host waits where a real device makes it wait: for memory that is not pinned for it, where a copy from there is
/// not small, and where the caller did not say non_blocking.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  Operands operands;
  Tensor from = source, to = target;
  const bool crosses = on_device(source) != on_device(target);
  const bool pinned = crosses && is_pinned(on_device(source) ? target : source);
  auto wait = HostWait::no;
  if (crosses && (!non_blocking || (!pinned && on_device(source)))) wait = HostWait::ordered;
  if (crosses && !pinned && on_device(target)) {
    from = source.clone();  // staged before the call returns
    if (wait == HostWait::no && source.nbytes() > Machine::instance().staged_bytes()) wait = HostWait::blocked;
  }
  if (on_device(source) || pinned) from = operands.cpu(source, false);
  if (on_device(target) || pinned) to = operands.cpu(target, true);
  Cost cost;
  const char* name = "copy_";
  if (crosses) {
    cost = {on_device(target) ? Engine::to_device : Engine::to_host, source.nbytes(), 0};
    name = on_device(target) ? "copy_ host to device" : "copy_ device to host";
  }
  operands.run(
      name, [from, to]() mutable { to.copy_(from); }, wait, cost);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  Operands operands;
  const auto value = std::make_shared<at::Scalar>();
  const Tensor twin = operands.cpu(tensor, false);
  operands.run(
      "_local_scalar_dense", [twin, value] { *value = twin.item(); }, HostWait::ordered);
  return *value;
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void fit(const Tensor& self) {
  const size_t needed = span(self).second;
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  fit(self);
  return self;
}

Tensor& set_offset(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  fit(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_offset(self, std::move(source), 0, numel, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  at::Storage none(at::Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true);
  return set_offset(self, std::move(none), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  const auto block = Machine::instance().find(self.storage().unsafeGetStorageImpl()->data());
  if (block) Machine::instance().record_stream(block, static_cast<int>(stream.id()));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}

}  // namespace deeptide::simulated
