// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Transfers of any size between the ranks of a host through a ring of slots: the piece of one is read while the next is
// written.
#pragma once

#include <functional>
#include <vector>

#include "comm/host_ring.h"
#include "comm/transport.h"

namespace deeptide::comm {

/// Bytes [offset, offset + bytes) of what `peer` sends.
struct Piece {
  int peer;
  int64_t offset;
  const char* data;
  int64_t bytes;
};

struct Transfer {
  std::vector<at::Tensor> tensors;         // kept alive
  const char* source;                      // what this rank sends; null: nothing, in as many pieces
  int64_t bytes;                           // the same on all ranks
  std::function<void(const Piece&)> take;  // of each piece of each rank, in order
};

/// Carries transfers one after the other. One thread at a time.
class HostChannel {
 public:
  explicit HostChannel(std::shared_ptr<Host> host);
  int size() const { return ring_->size(); }
  int index() const { return ring_->index(); }
  /// Sends the first pieces at once if no transfer is before it.
  OperationPtr start(Transfer transfer);

 private:
  std::shared_ptr<HostRing> ring_;
  OperationPtr last_;
};

/// `operation`, then `finish` when it is done.
OperationPtr then(OperationPtr operation, std::function<void()> finish);

}  // namespace deeptide::comm
