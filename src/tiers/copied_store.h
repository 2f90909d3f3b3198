// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buffers of the host that a device's copies read and write beside the host.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "device/lane.h"
#include "tiers/buffer.h"

namespace deeptide::tiers {

/// The reads of copies to a device that are under way, of many buffers. Each keeps its block open. Thread-safe.
class ReadsUnderWay {
 public:
  /// `most`: open at a time; beyond it the host waits for the oldest copy.
  explicit ReadsUnderWay(int64_t most = INT64_MAX) : most_(most) {}

  /// Ends what is done, and makes room for one more.
  void make_room();
  /// `owner`: tells buffers apart. `done`: passed once the copy is.
  void add(const void* owner, Lease source, device::Mark done);
  /// Returns once no copy reads the owner's blocks: the host waits.
  void wait_for(const void* owner);
  /// Makes the lane's later work run after them.
  void order_before(const device::Lane& lane, const void* owner);

 private:
  struct Read {
    const void* owner;
    Lease source;
    device::Mark done;
  };

  const int64_t most_;
  std::mutex mutex_;
  std::deque<Read> reads_;
};

/// `host`: lies in page-locked memory, or passes through it. Its leases are the host's: one waits for the copies that
/// read or write the buffer. Copies to a device, and from one to memory that stays, are only ordered.
Buffer copied_buffer(const Buffer& host, std::shared_ptr<ReadsUnderWay> reads);

}  // namespace deeptide::tiers
