// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors without memory: a storage that knows how its values come about.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "deferred/history.h"

namespace deeptide::deferred {

/// The stand-in for the bytes of a deferred storage.
struct Memory {
  explicit Memory(std::shared_ptr<Version> first);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::shared_ptr<Version> now;
  const uint64_t address;  // of nothing: it only tells this memory from all others, for as long as the process lives
};

/// Number of deferred storages in this process.
int64_t num_memories();

/// Makes a tensor with a deferred storage, on the geometry's device.
at::Tensor make_tensor(const Geometry& geometry, std::shared_ptr<Version> version);

/// Null if the tensor has its values.
Memory* memory_of(const at::Tensor& tensor);
inline bool is_deferred(const at::Tensor& tensor) { return memory_of(tensor) != nullptr; }

/// Returns the address of the tensor's first element in the Memory's range; 0 for a tensor that has its values.
uint64_t address_of(const at::Tensor& tensor);
/// Returns the start of that range.
uint64_t address_of(const at::Storage& storage);

/// Gives the tensor's storage, and so all its views, memory and values; nothing for a tensor that has them.
void materialize(const at::Tensor& tensor);
/// Returns the tensor on the CPU that all of a contiguous deferred tensor was copied from last, and that has not
/// changed since; undefined: its values came about otherwise.
at::Tensor source_of(const at::Tensor& tensor);
/// Returns the tensor's values in another type, in the same order of elements.
at::Tensor values_as(const at::Tensor& tensor, c10::ScalarType dtype);
/// Returns the values in memory of their own, in the same geometry; each deferred tensor stays what it is.
std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors);

}  // namespace deeptide::deferred
