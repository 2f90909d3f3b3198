// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks of a host ask each other for idle memory: they share the limit of their container.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "device/memory/idle_memory.h"
#include "device/memory/shared_memory.h"

namespace deeptide::host {

/// A rank's part: a thread that sleeps until another rank asks, then gives the kernel what this process's heap keeps
/// idle, whatever the rank's other threads do. An engine's part: a forked child, which lacks the thread, neither uses
/// nor destroys it.
class MemoryAppeal {
 public:
  /// Bytes of shared memory for `size` ranks.
  static int64_t bytes_for(int size);
  /// `lines`: so many zeroed bytes in `memory`, the same for all ranks. Without a thread, where the system has none
  /// left, this rank asks and does not answer.
  MemoryAppeal(std::shared_ptr<device::SharedMemory> memory, char* lines, int size, int index);
  ~MemoryAppeal();
  MemoryAppeal(const MemoryAppeal&) = delete;

 private:
  struct Line;
  void answer();

  std::shared_ptr<device::SharedMemory> memory_;
  Line* own_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
  std::unique_ptr<device::Asking> asking_;
};

}  // namespace deeptide::host
