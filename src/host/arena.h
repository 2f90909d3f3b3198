// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The flat memory that the ranks of one host share: one copy of the parameters, and per rank a heap whose buffers all
// others can read.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "device/memory/memory.h"
#include "host/host.h"

namespace deeptide::host {

/// One shared mapping: [parameters][heap of index 0][heap of index 1]… Thread-safe.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Collective over the host. Returns null on all its ranks if one cannot map it, with the reason in `why_not`. Units:
  /// bytes. A heap reserves addresses; it takes pages on use.
  static std::shared_ptr<Arena> create(Host& host, int64_t parameter_bytes, int64_t heap_bytes, std::string& why_not);
  ~Arena();

  /// A heap for the gradient buckets of so many elements, generously: many may wait for slower ranks. Units: bytes.
  static int64_t heap_of_buckets(int64_t numel);

  const std::shared_ptr<device::SharedMemory>& memory() const { return memory_; }
  /// Rounds a unit's bytes up to where the next may begin: parameters are laid out page by page.
  static int64_t padded(int64_t bytes);

  /// Returns (bytes,) uint8 from this rank's heap, on large-page boundaries from 2 MiB on, counted in `ledger` until
  /// its last reference is released. Errors: RuntimeError when the heap is full or there is too little memory.
  at::Tensor allocate(const std::shared_ptr<device::Ledger>& ledger, device::Role role, int64_t bytes);
  /// Returns the offset of a tensor from `allocate`, for the other ranks. Units: bytes.
  int64_t offset_of(const at::Tensor& tensor) const;
  /// Returns the tensor at such an offset, on any rank's heap. Shapes: (numel,).
  at::Tensor at(int64_t offset, int64_t numel, at::ScalarType dtype) const;

 private:
  class Heap;
  Arena(std::shared_ptr<device::SharedMemory> memory, int64_t heap_begin, int64_t heap_bytes);

  std::shared_ptr<device::SharedMemory> memory_;
  std::unique_ptr<Heap> heap_;
};

}  // namespace deeptide::host
