// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buckets that this rank is done with, until the other ranks of its host have read them.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "device/memory/memory.h"
#include "host/exchange.h"

namespace deeptide::gradients {

/// Returns buckets to their pool, in the order in which they were lent. Thread-safe.
class LentBuckets {
 public:
  LentBuckets(host::Exchange& exchange, device::BufferPool& pool) : exchange_(exchange), pool_(pool) {}

  /// This rank has read all that the host's ranks offered up to `offer`; they may still read this bucket.
  void lend(at::Tensor bucket, uint32_t offer);
  /// Takes back what all have read.
  void reclaim();
  /// Whether a bucket is lent, and the first one's readers are done.
  bool empty() const;
  bool first_is_read() const;
  /// Waits at most `limit` until all have read the bucket that was lent first; returns whether they have.
  bool wait_for_first(std::chrono::milliseconds limit);

 private:
  struct Lent {
    at::Tensor bucket;
    uint32_t offer;
  };
  std::optional<uint32_t> first() const;

  host::Exchange& exchange_;
  device::BufferPool& pool_;
  mutable std::mutex mutex_;
  std::deque<Lent> lent_;
};

}  // namespace deeptide::gradients
