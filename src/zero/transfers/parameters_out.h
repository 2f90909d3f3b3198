// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parameters that a device has stepped, to shards that lie off it, block by block, while the device goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>

#include "device/lane.h"
#include "device/memory/memory.h"
#include "tiers/buffer.h"

namespace deeptide::zero {

/// Two lanes, one that narrows and one that copies. Used by one thread.
class ParametersOut {
 public:
  /// `narrowed_bytes`: the largest part that is narrowed; 0: none is.
  ParametersOut(std::shared_ptr<device::Ledger> ledger, at::Device device, int64_t narrowed_bytes);
  /// Returns once no copy reads a master.
  ~ParametersOut();
  ParametersOut(const ParametersOut&) = delete;
  ParametersOut& operator=(const ParametersOut&) = delete;

  /// Memory of the device in which blocks are narrowed. Units: bytes.
  static int64_t forecast(int64_t narrowed_bytes);
  int64_t nbytes() const { return arena_.defined() ? static_cast<int64_t>(arena_.nbytes()) : 0; }

  /// Starts to overwrite the elements of `shard` from `begin` on by `master` (N,), as the current lane has it by now.
  /// The host waits for what passes to files, and for nothing else.
  void send(const at::Tensor& master, const tiers::Buffer& shard, int64_t begin);
  /// Makes the current lane's later work follow all copies so far: masters may change.
  void join();

 private:
  struct Slot {
    at::Tensor memory;        // bytes
    device::Mark free_after;  // passed: it may be overwritten
  };

  at::Tensor narrowed(const at::Tensor& values, at::ScalarType dtype);

  std::shared_ptr<device::Ledger> ledger_;
  device::Lane narrow_, out_;
  at::Tensor arena_;
  std::array<Slot, 2> slots_;  // one that is narrowed while the other is copied
  size_t next_ = 0;            // of these
  bool is_under_way_ = false;  // whether anything was sent since `join`
};

}  // namespace deeptide::zero
