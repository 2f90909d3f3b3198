// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Page-locked memory of the host for many buffers, between which and a device copies run beside the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "device/memory/memory.h"

namespace deeptide::device {

/// Returns memory (bytes,) of the host, page-locked for this device, whatever torch's empty(pin_memory) would take:
/// that is for a GPU wherever there is one. Says so in the log, once, if it is not: copies then make the host wait.
at::Tensor allocate_page_locked(int64_t bytes, at::Device device);

/// Torch's allocators of page-locked memory round each request up to a power of two. So buffers share chunks of such
/// sizes: what is left over is at most an eighth and one buffer. Buffers begin on pages.
class PageLocked {
 public:
  /// `sizes`: bytes of the buffers, in the order in which they will be taken. Counted in `ledger` while this lives.
  PageLocked(std::shared_ptr<Ledger> ledger, Role role, at::Device device, const std::vector<int64_t>& sizes);
  /// Nothing may use a buffer any more.
  ~PageLocked();
  PageLocked(const PageLocked&) = delete;
  PageLocked& operator=(const PageLocked&) = delete;

  /// The memory of all chunks. Units: bytes.
  static int64_t forecast(const std::vector<int64_t>& sizes);
  int64_t nbytes() const { return bytes_; }

  /// The next buffer (numel,); its bytes are those that were announced.
  at::Tensor take(int64_t numel, at::ScalarType dtype);

 private:
  std::shared_ptr<Ledger> ledger_;
  Role role_;
  std::vector<at::Tensor> buffers_;  // as bytes
  size_t next_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace deeptide::device
