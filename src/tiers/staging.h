// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A fixed number of block-sized buffers through which blocks travel between files and their users: read ahead, written
// behind.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/memory/memory.h"
#include "device/memory/page_locked.h"
#include "io/queue.h"
#include "tiers/swap_file.h"

namespace deeptide::tiers {

/// Thread-safe. At most `num_slots` blocks may be open at a time.
class Staging {
 public:
  Staging(std::unique_ptr<io::Queue> queue, int num_slots, const std::shared_ptr<device::Ledger>& ledger,
          device::Role role, at::Device device = at::kCPU);
  /// Ends transfers under way.
  ~Staging();
  Staging(const Staging&) = delete;

  /// Which block of which region; `owner` tells regions apart.
  struct Key {
    const void* owner = nullptr;
    int64_t block = -1;
    bool operator==(const Key&) const = default;
  };

  /// Returns the block's memory as bytes (kSwapBlockBytes,), valid until `close`. With `keep_values` it holds what the
  /// file holds, or what was written last; otherwise anything. Errors: RuntimeError naming the folder and `what`.
  at::Tensor open(Key key, const DiskPlace& place, bool keep_values, const std::string& what);
  /// `changed`: the block must reach its file before its memory is used again.
  void close(Key key, bool changed) noexcept;
  /// Ends the transfers of the owner's blocks and drops them.
  void forget(const void* owner) noexcept;
  /// Starts reading the block if a buffer is free for it; what was announced last stays longest.
  void prefetch(Key key, const DiskPlace& place, const std::string& what);
  /// Returns the block, which nobody writes meanwhile, as bytes in memory of its own. Takes no buffer from others.
  at::Tensor copy_of(Key key, const DiskPlace& place, const std::string& what);
  /// Starts writing the owner's changed blocks.
  void write_behind(const void* owner);

  /// Units: bytes.
  int64_t nbytes() const { return static_cast<int64_t>(slots_.size()) * kSwapBlockBytes; }
  const char* queue_name() const { return queue_->name(); }

 private:
  enum class State : uint8_t { empty, reading, clean, dirty, writing };
  struct Slot {
    at::Tensor memory;
    State state = State::empty;
    Key key;
    DiskPlace place;
    std::string what;                         // for errors
    std::optional<io::Queue::Ticket> ticket;  // absent: the block's file no longer has its place
    int leases = 0;
    uint64_t last_use = 0;
  };

  Slot* find(Key key);
  Slot& take();
  void lend(Slot& slot, Key key, const DiskPlace& place, const std::string& what);
  Slot* idle_slot();
  void start(Slot& slot, bool read);
  void finish(Slot& slot);
  std::string result_of(Slot& slot);
  void settle_writes();

  std::mutex mutex_;
  std::unique_ptr<io::Queue> queue_;
  std::unique_ptr<device::PageLocked> locked_;  // what slots lie in, if that is page-locked
  at::Tensor arena_;                            // or else
  std::vector<Slot> slots_;
  uint64_t clock_ = 0;
};

}  // namespace deeptide::tiers
