// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Flat memory by role: large pages, 64-byte alignment, every byte counted; pools that keep pages instead of faulting
// anew.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "device/lane.h"

namespace deeptide::device {

/// Shards and parameters start on this boundary, so that one vector or one cache line never belongs to two of them.
inline constexpr int64_t kAlignmentBytes = 64;

enum class Role : uint8_t { parameters, gradients, optimizer, gathered, communication };
inline constexpr int kNumRoles = 5;
const char* role_name(Role role);

/// Counts what is allocated, now and at its peak. Thread-safe; outlives every buffer counted in it.
class Ledger {
 public:
  void add(Role role, int64_t bytes);
  int64_t current(Role role) const;
  int64_t peak(Role role) const;

 private:
  mutable std::mutex mutex_;
  std::array<int64_t, kNumRoles> current_{};
  std::array<int64_t, kNumRoles> peak_{};
};

/// A zeroed flat tensor (numel,) of its own memory, counted in `ledger` until its last reference goes.
/// On the CPU: mapped, in large pages from 2 MiB on. Elsewhere: torch's allocator.
/// Errors: RuntimeError naming role and bytes when the memory cannot be had.
at::Tensor allocate_flat(const std::shared_ptr<Ledger>& ledger, Role role, int64_t numel, at::ScalarType dtype,
                         at::Device device);

/// Keeps released buffers for the next taker: gathered units and gradient buckets come and go many times a step.
/// Contents of a taken buffer are undefined. Thread-safe. Must outlive every engine thread that uses it; buffers taken
/// from it may outlive the pool.
class BufferPool {
 public:
  /// A kept buffer serves a taker of `max_waste` times fewer bytes too; 1: only one of its own size, so that what is
  /// allocated never exceeds the most that was taken at once.
  /// `source`: where new buffers, (bytes,) uint8 each, come from instead of `allocate_flat`.
  using Source = std::function<at::Tensor(int64_t bytes)>;
  BufferPool(std::shared_ptr<Ledger> ledger, Role role, at::Device device, int64_t max_waste = 2, Source source = {});
  /// (numel,) of `dtype`; give it back with `put` (or drop it: then its memory is freed).
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  /// On a device, the next taker's work is ordered after the work that this thread's lane has been given so far.
  void put(at::Tensor buffer);
  /// Frees idle buffers.
  void trim();

 private:
  /// A buffer as bytes, and the point after its last use.
  struct Idle {
    at::Tensor buffer;
    Mark free_after;
  };

  Idle take_idle(int64_t bytes);

  std::shared_ptr<Ledger> ledger_;
  Role role_;
  at::Device device_;
  int64_t max_waste_;
  Source source_;
  std::mutex mutex_;
  std::vector<Idle> idle_;
};

}  // namespace deeptide::device
