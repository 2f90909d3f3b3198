// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each rank of a host offers a buffer of the arena, and reads its slice of everybody's where it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "host/arena.h"
#include "host/operation.h"
#include "host/ring.h"

namespace deeptide::host {

/// The reduce-scatter of one host without its copies: the reader does the sum. Offers come in the same order on all
/// ranks. One thread of a rank at a time.
class Exchange {
 public:
  static constexpr int kMaxOffers = 4096;  // that somebody has not read yet

  /// Collective in the sense of Host::reserve.
  Exchange(const std::shared_ptr<Host>& host, std::shared_ptr<Arena> arena);

  struct Offer {
    OperationPtr operation;  // done when all ranks have offered theirs
    uint32_t number = 0;
  };
  /// `flat` comes from the arena and stays as it is until `all_read`. Never waits.
  Offer offer(const at::Tensor& flat);
  /// Elements [begin, begin + numel) of everybody's buffer, in rank order, in place. Shapes: (numel,) each.
  std::vector<at::Tensor> rows(uint32_t number, int64_t begin, int64_t numel, at::ScalarType dtype) const;
  /// This rank has read its rows of all offers up to `number`.
  void set_read(uint32_t number) { ring_->set_read(number); }
  bool all_read(uint32_t number) const { return ring_->all_read(number); }

  Arena& arena() const { return *arena_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Ring> ring_;
};

}  // namespace deeptide::host
