// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves rows between all pairs of ranks at once, so that both directions of every link are in use.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/transport/transport.h"
#include "comm/transport/waiting_line.h"

namespace deeptide::comm {

/// Exchanges over a c10d backend that sends and receives memory of the CPU. Bytes go from the caller's memory to the
/// socket and back, without a copy between. Gloo's own collectives copy into flat buffers and use one direction at a
/// time: an all-to-all of 184 MB at 1 Gbit/s took twice as long, and six times as much of a core.
/// Used by one thread. Exchanges end in the order in which they began.
class PairExchange {
 public:
  /// Errors: as start_needed_thread, if the backend's memory is the CPU's; others need no thread.
  explicit PairExchange(Network network);
  /// Sends to[r] to rank r, which receives it as from[own rank]; all ranks call it in one order. Rows that two ranks
  /// exchange have equal sizes on both; empty ones do not travel.
  /// Shapes: contiguous, as many of each as ranks; to[own rank] and from[own rank] may be the same memory.
  host::OperationPtr start(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

 private:
  class Exchange;

  Network network_;
  size_t num_started_ = 0;
  WaitingLine line_;
};

}  // namespace deeptide::comm
