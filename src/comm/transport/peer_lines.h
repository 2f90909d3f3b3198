// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sends and receives between two ranks over a c10d backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "comm/transport/transport.h"
#include "comm/transport/waiting_line.h"

namespace deeptide::comm {

/// For memory of the CPU. No transfer has a thread of its own: one waits for all that go to a rank, one for all that
/// come from it. Neither waits for the other: what a rank waits for may depend on what another has sent it meanwhile.
/// Used by one thread.
class PeerLines {
 public:
  explicit PeerLines(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  /// Send and receive like Transport's, by the backend's ranks, tensors that are not empty.
  OperationPtr send(at::Tensor tensor, int to);
  OperationPtr receive(at::Tensor tensor, int from);

 private:
  template <typename Start>
  OperationPtr add(WaitingLine& line, at::Tensor tensor, const Start& start);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::map<int, WaitingLine> to_, from_;  // by rank
};

}  // namespace deeptide::comm
