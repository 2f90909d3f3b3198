// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each rank of a host offers a buffer of the arena, and reads its slice of all ranks' buffers in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <vector>

#include "host/arena.h"
#include "host/operation.h"
#include "host/ring.h"

namespace deeptide::host {

/// The reduce-scatter of one host without its copies: the reader sums. All ranks offer in the same order. One thread
/// per rank at a time.
class Exchange {
 public:
  static constexpr int kMaxOffers = 4096;  // that some rank has not read yet

  /// Collective in the sense of Host::reserve.
  Exchange(const std::shared_ptr<Host>& host, std::shared_ptr<Arena> arena);

  struct Offer {
    OperationPtr operation;  // done when all ranks have made this offer
    uint32_t number = 0;
  };
  /// Offers `flat`, which comes from the arena and must not change until `all_read`. Never waits.
  Offer offer(const at::Tensor& flat);
  /// Elements [begin, begin + numel) of all ranks' buffers, in rank order, in place. Shapes: (numel,) each.
  std::vector<at::Tensor> rows(uint32_t number, int64_t begin, int64_t numel, at::ScalarType dtype) const;
  /// Reports that this rank has read its rows of all offers up to `number`.
  void set_read(uint32_t number) { ring_->set_read(number); }
  bool all_read(uint32_t number) const { return ring_->all_read(number); }
  /// Waits at most `limit` until all ranks have read this offer; returns whether they have. If one has ended, they have
  /// not.
  bool wait_read(uint32_t number, std::chrono::milliseconds limit);

  Arena& arena() const { return *arena_; }
  /// Ranks of the host.
  int size() const { return ring_->size(); }

 private:
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Ring> ring_;
};

}  // namespace deeptide::host
