// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The public names of deferred construction.
#include <ATen/core/grad_mode.h>

#include "deeptide/zero.h"
#include "deferred/memory.h"
#include "deferred/parts.h"
#include "deferred/recorder.h"
#include "sharding/gate.h"

namespace deeptide::zero {

struct Init::Scope : deferred::Scope {
  using deferred::Scope::Scope;
};

Init::Init(int64_t min_bytes) : scope_(std::make_unique<Scope>(min_bytes)) {}
Init::~Init() = default;

struct ValueParts::Impl : deferred::Parts {};

ValueParts::ValueParts(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ValueParts::~ValueParts() = default;

std::unique_ptr<ValueParts> ValueParts::of(const at::Tensor& tensor) {
  auto parts = deferred::Parts::of(tensor);
  if (!parts) return nullptr;
  return std::unique_ptr<ValueParts>(new ValueParts(std::make_unique<Impl>(Impl{*std::move(parts)})));
}

at::Tensor ValueParts::next(int64_t count) { return impl_->next(count); }

bool is_deferred(const at::Tensor& tensor) { return deferred::is_deferred(tensor); }

bool has_deferred_key(const at::Tensor& tensor) { return deferred::has_key(tensor); }

bool is_sharded(const at::Tensor& tensor) { return sharding::is_lent(tensor); }

void materialize(const at::Tensor& tensor) { deferred::materialize(tensor); }

void replace_values(const at::Tensor& tensor, const at::Tensor& values) {
  deferred::set_key(tensor, false);
  const_cast<at::Tensor&>(tensor).set_data(values);
}

uint64_t address_of(const at::Tensor& tensor) { return deferred::address_of(tensor); }
uint64_t address_of(const at::Storage& storage) { return deferred::address_of(storage); }

void wait_for_values(const at::Tensor& tensor) {
  if (has_deferred_key(tensor) && tensor.has_storage()) sharding::wait_for_values(tensor.storage());
}
void wait_for_values(const at::Storage& storage) { sharding::wait_for_values(storage); }

at::Tensor values_of(const at::Tensor& tensor) {
  if (deferred::is_deferred(tensor)) return deferred::values_of({tensor}).front();
  const at::NoGradGuard no_grad;
  return tensor.detach().clone();
}

void lend_memory(const at::Tensor& tensor, const at::Tensor& whole) {
  // Out-of-tree backends exchange memory only between tensors of equal keys.
  if (has_deferred_key(tensor)) deferred::set_key(whole, true);
  const_cast<at::Tensor&>(tensor).set_data(whole);
}

}  // namespace deeptide::zero
