// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Memory of the simulated accelerator: the addresses that tensors carry, and the pages behind them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace deeptide::simulated {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// pinned_elsewhere: for another type of device. To this one it is any memory of the host.
enum class Kind : uint8_t { device, pinned, pinned_elsewhere };

/// clock[s]: the number of the last task of stream s that is known to come before.
using Clock = std::vector<uint64_t>;

/// A task's use of bytes [begin, end) of a block.
struct Access {
  size_t begin = 0, end = 0;
  bool write = false;
  int stream = 0;
  uint64_t tick = 0;  // the task's number in its stream
  std::string task;
};

/// One allocation. `shown` is the address that tensors carry: of device memory, the host can neither read nor write it
/// there. `real` is a second mapping of the same pages, for kernels.
class Block {
 public:
  Block(Kind kind, size_t bytes, int home);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// "device memory of 400 bytes"
  std::string describe() const;
  /// Guards pinned memory: protects pages that a task may still write from the host, and those that it may still read
  /// from the host's writes. Later accesses of the host end the process with a message.
  void guard();
  bool guarded() const { return guarded_; }

  const Kind kind;
  const size_t bytes;
  const size_t room;  // bytes taken, a multiple of the alignment
  const int home;     // the stream that was current at the allocation
  char* shown = nullptr;
  char* real = nullptr;
  std::vector<Access> accesses;  // that the host does not know to be done
  std::set<int> recorded;        // streams named by record_stream

 private:
  bool guarded_ = false;
};
using BlockRef = std::shared_ptr<Block>;

}  // namespace deeptide::simulated
