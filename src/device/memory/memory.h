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
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "device/lane.h"

namespace deeptide::device {

/// Shards and parameters start on this boundary, so no vector and no cache line belongs to two of them.
inline constexpr int64_t kAlignmentBytes = 64;

enum class Role : uint8_t {
  parameters,
  gradients,
  optimizer,
  gathered,
  communication,
  late_gradients,      // beyond what was reserved, mostly because another rank is late
  late_communication,  // likewise
  activations,         // what passes through memory on its way to files and back
  host_optimizer,      // of a device's engine, in the host's memory: no cap of the device's memory counts it
  host_parameters,     // likewise
  host_gradients,      // likewise
  host_activations,    // likewise
};
inline constexpr int kNumRoles = 12;
const char* role_name(Role role);
/// Whether it counts memory of the host beside a device's.
inline bool is_off_device(Role role) { return role >= Role::host_optimizer; }
/// The role of what a pool takes beyond its reserve.
Role beyond_reserve(Role role);

/// Counts allocated bytes, current and peak. Thread-safe; outlives every buffer counted in it.
class Ledger {
 public:
  /// `cap`: the most bytes of all roles together, but for those off the device; 0: no limit.
  explicit Ledger(int64_t cap = 0) : cap_(cap) {}
  void add(Role role, int64_t bytes);
  int64_t current(Role role) const;
  int64_t peak(Role role) const;
  /// Call it before memory is allocated. Errors: OutOfMemoryError naming role and bytes, if they exceed the cap.
  void check_room(Role role, int64_t bytes) const;
  /// For errors: what each role has, then which settings free memory.
  std::string text() const;
  /// `advice`: names such settings; called while an error is made. Null: none are known.
  void set_advice(std::function<std::string()> advice);

 private:
  const int64_t cap_;
  std::function<std::string()> advice_;
  mutable std::mutex mutex_;
  std::array<int64_t, kNumRoles> current_{};
  std::array<int64_t, kNumRoles> peak_{};
};

/// Returns a zeroed flat tensor (numel,) with memory of its own, counted in `ledger` until its last reference is
/// released. On the CPU: mapped, in large pages from 2 MiB on; a forked child has a copy. Elsewhere: torch's allocator.
/// Errors: OutOfMemoryError on a device, or beyond the ledger's cap; else RuntimeError if memory cannot be mapped. They
/// name role and bytes, and what the ledger holds.
at::Tensor allocate_flat(const std::shared_ptr<Ledger>& ledger, Role role, int64_t numel, at::ScalarType dtype,
                         at::Device device);

inline constexpr int64_t kDefaultMaxWaste = 2;

/// Keeps released buffers for reuse: gathered units and gradient buckets are taken and released many times per step.
/// Contents of a taken buffer are undefined. Thread-safe. Must outlive every engine thread that uses it; buffers taken
/// from it may outlive the pool.
class BufferPool {
 public:
  /// A kept buffer also serves a request of up to `max_waste` times fewer bytes. With 1, only a request of its own
  /// size, so the allocated bytes never exceed the most that were taken at once.
  /// `source` makes new buffers, (bytes,) uint8 each, instead of `allocate_flat`.
  /// `home`: the lane on which memory is taken and freed; absent: the one that is current now. Best the taker's.
  using Source = std::function<at::Tensor(int64_t bytes, Role role)>;
  BufferPool(std::shared_ptr<Ledger> ledger, Role role, at::Device device, int64_t max_waste = kDefaultMaxWaste,
             Source source = {}, std::optional<Lane> home = std::nullopt);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  /// Promises buffers of these sizes, made together by the next `take`. Each serves any request that it can hold, and
  /// is kept until `trim`, after which a `take` makes it anew. What else is taken counts as `beyond_reserve`. Units:
  /// bytes.
  void reserve(std::vector<int64_t> sizes);
  /// Makes small new buffers, too, replace idle ones where the ledger's role would otherwise hold more than this.
  void keep_within(int64_t bytes) { most_bytes_ = bytes; }
  /// Whether `take` gives a buffer that is idle or promised.
  bool has(int64_t numel, at::ScalarType dtype);
  /// Takes a buffer (numel,) of `dtype` for work of the current lane. Hand it back with `put`, or drop it, which frees
  /// its memory: on a device, after its last use on any lane but the home one.
  /// `reached`: a buffer that was put `after` something later is not given.
  at::Tensor take(int64_t numel, at::ScalarType dtype, int64_t reached = INT64_MAX);
  /// On a device, the next taker's work runs after all work issued so far to this thread's lane. `after`: the number of
  /// what that work may have to wait for, if the taker has to know.
  void put(at::Tensor buffer, int64_t after = 0);
  /// Frees idle buffers, all that `bytes` have no room for.
  void trim(int64_t bytes = 0);

 private:
  /// A buffer as bytes, and the mark after its last use.
  struct Idle {
    at::Tensor buffer;
    Mark free_after;
    int64_t after = 0;
    bool is_reserved = false;
  };

  void make_promised();
  int64_t fit(const Idle& idle, int64_t bytes, int64_t reached) const;
  Idle take_idle(int64_t bytes, int64_t reached);
  at::Tensor make(int64_t bytes, int64_t reached, bool is_promised = false);
  void free_idle(int64_t but_bytes, int64_t reached, bool reserved_too = true);

  std::shared_ptr<Ledger> ledger_;
  Role role_;
  at::Device device_;
  int64_t max_waste_;
  Source source_;
  Lane home_;
  int64_t most_bytes_ = INT64_MAX;
  std::mutex mutex_;
  std::vector<Idle> idle_;
  bool reserves_ = false;
  std::vector<int64_t> promised_;   // reserved sizes that have no memory now
  std::set<const void*> reserved_;  // addresses of those that have
};

/// A BufferPool without memory: the bytes that one would allocate for a series of requests. Units: bytes.
class PoolForecast {
 public:
  explicit PoolForecast(int64_t max_waste) : max_waste_(max_waste) {}
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
