// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets one thread save the state that another one trains: what is about to change is copied first.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/save/piece.h"

namespace deeptide::checkpoint {

/// The writer reads live memory and files as they are, block by block, for as long as nobody changes them. Whoever is
/// about to change a group of pieces first keeps what the writer has not read yet, in memory that is bounded: where it
/// is full, the change waits until the writer has come as far, for its blocks only.
class LiveState {
 public:
  /// `most_bytes`: of the copies at a time; one block at least.
  explicit LiveState(int64_t most_bytes) : most_bytes_(most_bytes) {}
  LiveState(const LiveState&) = delete;

  /// Before the writer starts. Makes the pieces' data safe to read in another thread while this object lives.
  void protect(std::vector<Piece>& pieces);
  /// Copies the pieces that may change at any time, and returns once all are copied. The writer runs.
  void keep_unprotected() { changing(kAnytime); }
  /// The pieces of this group are about to change. Not from the writer's thread. Never throws: where a copy cannot be
  /// taken, the writer fails and names the cause.
  void changing(int group);
  /// The writer reads no more: nothing needs to be kept.
  void release();
  /// Likewise, and what the writer still asks for is an error.
  void give_up();

  /// Time that changes have waited for, and taken with copies.
  std::chrono::nanoseconds waited() const;
  /// The largest size of all copies. Units: bytes.
  int64_t peak_bytes() const;

 private:
  struct Copy {
    int64_t begin = 0;
    at::Tensor values;
  };
  struct Source {
    PieceData live;
    int64_t numel = 0;
    int64_t read = 0;         // elements that the writer has
    int64_t kept = 0;         // elements before it are read, or lie in `copies`
    bool in_use = false;      // the writer reads the live elements
    std::deque<Copy> copies;  // in order; the first holds element `read`
  };

  void take(Source& source, int64_t begin, const at::Tensor& block);
  int64_t take_copied(Source& source, const at::Tensor& block);
  void keep(Source& source, std::unique_lock<std::mutex>& lock);

  const int64_t most_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::vector<std::unique_ptr<Source>> sources_;
  std::map<int, std::vector<Source*>> unkept_;  // by group
  int64_t bytes_ = 0, peak_bytes_ = 0;
  bool released_ = false;
  std::string lost_;  // why a copy could not be taken, and the save fails; empty: none
  std::chrono::nanoseconds waited_{0};
};

}  // namespace deeptide::checkpoint
