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

/// Shards and parameters start on this boundary, so no vector and no cache line belongs to two of them.
inline constexpr int64_t kAlignmentBytes = 64;

enum class Role : uint8_t { parameters, gradients, optimizer, gathered, communication };
inline constexpr int kNumRoles = 5;
const char* role_name(Role role);

/// Counts allocated bytes, current and peak. Thread-safe; outlives every buffer counted in it.
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

/// Returns a zeroed flat tensor (numel,) with memory of its own, counted in `ledger` until its last reference is
/// released. On the CPU: mapped, in large pages from 2 MiB on. Elsewhere: torch's allocator.
/// Errors: RuntimeError naming role and bytes if the memory cannot be allocated; OutOfMemoryError on a device.
at::Tensor allocate_flat(const std::shared_ptr<Ledger>& ledger, Role role, int64_t numel, at::ScalarType dtype,
                         at::Device device);

/// Keeps released buffers for reuse: gathered units and gradient buckets are taken and released many times per step.
/// Contents of a taken buffer are undefined. Thread-safe. Must outlive every engine thread that uses it; buffers taken
/// from it may outlive the pool.
class BufferPool {
 public:
  /// A kept buffer also serves a request of up to `max_waste` times fewer bytes. With 1, only a request of its own
  /// size, so the allocated bytes never exceed the most that were taken at once.
  /// `source` makes new buffers, (bytes,) uint8 each, instead of `allocate_flat`.
  using Source = std::function<at::Tensor(int64_t bytes)>;
  BufferPool(std::shared_ptr<Ledger> ledger, Role role, at::Device device, int64_t max_waste = 2, Source source = {});
  /// Takes a buffer (numel,) of `dtype`. Hand it back with `put`, or drop it, which frees its memory.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  /// On a device, the next taker's work runs after all work issued so far to this thread's lane.
  void put(at::Tensor buffer);
  /// Frees idle buffers.
  void trim();

 private:
  /// A buffer as bytes, and the mark after its last use.
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

/// A BufferPool without memory: the bytes that one would allocate for a series of requests. Units: bytes.
class PoolForecast {
 public:
  explicit PoolForecast(int64_t max_waste = 2) : max_waste_(max_waste) {}
  /// Returns the size of the buffer that the pool would give, to hand back with `put`.
  int64_t take(int64_t bytes);
  void put(int64_t bytes) { idle_.push_back(bytes); }
  int64_t peak() const { return peak_; }

 private:
  int64_t max_waste_;
  std::vector<int64_t> idle_;
  int64_t allocated_ = 0, peak_ = 0;
};

}  // namespace deeptide::device
