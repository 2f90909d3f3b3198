// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves bytes from one rank of a host to another through a few slots of shared memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "host/host.h"
#include "host/operation.h"

namespace deeptide::host {

/// One direction between each pair of ranks of a host. Transfers of a direction end in the order in which they were
/// started; directions do not wait on each other. One thread per rank at a time.
class Pipes {
 public:
  /// Collective in the sense of Host::reserve. Reserves 128 KiB per pair of ranks and direction; the kernel commits
  /// memory only for pairs that communicate.
  explicit Pipes(std::shared_ptr<Host> host);
  ~Pipes();

  /// Sends a contiguous CPU tensor to the rank of index `to`, which must receive as many bytes.
  /// Errors (on use): TransportError when that rank's process has ended; RuntimeError for a tensor not on the CPU.
  OperationPtr send(at::Tensor tensor, int to);
  /// Fills a contiguous CPU tensor from the rank of index `from`. Errors: as `send`.
  OperationPtr receive(at::Tensor tensor, int from);

 private:
  struct Pipe;
  class Transit;

  /// This rank's end of one direction.
  struct End {
    std::shared_ptr<Pipe> pipe;  // null: to this rank itself
    OperationPtr last;           // the previous transfer
  };

  OperationPtr start(End& end, at::Tensor tensor, bool sends);

  std::shared_ptr<Host> host_;
  std::vector<End> out_;  // by index
  std::vector<End> in_;
};

}  // namespace deeptide::host
