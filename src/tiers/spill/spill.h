// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors that lie outside the device's memory, or outside all memory, until they are wanted again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "device/memory/memory.h"
#include "tiers/offload.h"

namespace deeptide::tiers {

/// Takes what forward saves, and gives it back to backward, mostly the last one first. Thread-safe. A forked child may
/// drop tensors, which does nothing there.
class Spill {
 public:
  using Id = int64_t;

  virtual ~Spill() = default;
  /// Copies the values of a strided tensor, which may change as soon as this returns. Errors: RuntimeError naming the
  /// folder: a full disk, or an earlier tensor that could not be written.
  virtual Id put(const at::Tensor& tensor) = 0;
  /// Returns a tensor like the one that was put, on its device, in memory of its own. Errors: RuntimeError naming the
  /// folder.
  virtual at::Tensor get(Id id) = 0;
  virtual void drop(Id id) noexcept = 0;
  /// Bytes of the tensors at the fullest moment.
  virtual int64_t peak_bytes() const = 0;
};

/// In the host's memory, page-locked for a GPU, counted as activations there.
std::unique_ptr<Spill> spill_to_host(std::shared_ptr<device::Ledger> ledger);

/// In files: tensors lie one after another in blocks, which are written behind and read ahead, the last one first.
/// `device`: of the tensors. Errors: RuntimeError naming a folder that cannot be used.
std::unique_ptr<Spill> spill_to_files(const OffloadOptions& options, const std::shared_ptr<device::Ledger>& ledger,
                                      at::Device device);

}  // namespace deeptide::tiers
