// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The order of work on a device: streams and events, or nothing on a CPU.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

namespace deeptide::device {

/// A point in a lane. It is passed once all earlier work is done, so on a CPU always. Value type.
class Mark {
 public:
  Mark() = default;
  bool passed() const;
  /// Returns once it is passed: the host waits.
  void wait() const;

 private:
  friend class Lane;
  explicit Mark(std::shared_ptr<c10::Event> event) : event_(std::move(event)) {}

  std::shared_ptr<c10::Event> event_;  // null: passed
};

/// A sequence of work on one device. On a CPU a call's work is done when the call returns, so every method is free.
/// Value type: copies denote one lane.
class Lane {
 public:
  /// The lane that this thread's operators use.
  static Lane current(c10::Device device);
  /// A new lane, for work that overlaps the current lane's.
  static Lane create(c10::Device device);

  c10::Device device() const { return device_; }
  bool operator==(const Lane& other) const { return stream_ == other.stream_; }
  /// The point after all work issued to this lane so far.
  Mark mark() const;
  /// Makes work issued to this lane later run after `mark`. The host does not wait.
  void wait_for(const Mark& mark) const;
  /// The stream as its device's own interface has it, a cudaStream_t for one; null on a CPU.
  void* handle() const;

  /// While it lives, this thread's operators go to the lane.
  class Scope {
   public:
    explicit Scope(const Lane& lane);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::optional<c10::Stream> before_;
  };

 private:
  Lane(c10::Device device, std::optional<c10::Stream> stream) : device_(device), stream_(stream) {}

  c10::Device device_;
  std::optional<c10::Stream> stream_;  // nothing on a CPU
};

}  // namespace deeptide::device
