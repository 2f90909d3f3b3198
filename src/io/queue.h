// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Transfers between buffers and files that stay under way while their user works on.
#pragma once

#include <cstdint>
#include <memory>

namespace deeptide::io {

/// The alignment that O_DIRECT requires of a transfer's address, offset and size. Units: bytes.
inline constexpr int64_t kAlignment = 4096;

struct Transfer {
  int fd = -1;
  int64_t at = 0;  // in the file
  void* data = nullptr;
  int64_t bytes = 0;
  bool read = false;  // else write
};

/// Used by one thread. Buffers must outlive their transfers; the destructor waits for those under way.
class Queue {
 public:
  using Ticket = uint64_t;

  virtual ~Queue() = default;
  virtual Ticket start(const Transfer& transfer) = 0;
  /// Waits for a transfer, once. Returns 0 or its errno; EIO for a short one.
  virtual int wait(Ticket ticket) = 0;
  /// Whether `wait` would return at once.
  virtual bool is_done(Ticket ticket) = 0;
  /// "io_uring", "threads".
  virtual const char* name() const = 0;
};

/// `depth`: transfers under way at a time; further ones wait inside. io_uring where this kernel allows it.
std::unique_ptr<Queue> make_queue(int depth);
std::unique_ptr<Queue> make_thread_queue(int depth);
/// A kernel's moods, for tests.
struct RingFaults {
  int (*refuse)() = nullptr;     // before the kernel is asked: the error number that it answers with, 0 to ask
  int (*answer)(int) = nullptr;  // each transfer's result, in bytes or a negative error number: what is taken for it
};
/// Null where io_uring cannot be used; io_uring_obstacle() says why.
std::unique_ptr<Queue> make_ring_queue(int depth, const RingFaults& faults = {});

}  // namespace deeptide::io
