// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Transfers of any size between the ranks of a host through a ring of slots: one piece is read while the next is
// written.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "host/operation.h"
#include "host/ring.h"

namespace deeptide::host {

/// Bytes [offset, offset + bytes) of what each rank sends.
struct Pieces {
  int64_t offset;
  int64_t bytes;
  std::vector<const char*> data;  // by index; this rank's entry is its source (null if it sends nothing)
};

struct Transfer {
  std::vector<at::Tensor> tensors;          // kept alive
  const char* source;                       // what this rank sends; null: nothing, in as many pieces
  int64_t bytes;                            // equal on all ranks
  std::function<void(const Pieces&)> take;  // piece by piece, in order
  int64_t own_begin = 0, own_end = 0;       // bytes of the source that no other rank reads, hence not copied
};

/// Carries transfers one after another. One thread at a time.
class Channel {
 public:
  explicit Channel(std::shared_ptr<Host> host);
  explicit Channel(std::shared_ptr<Ring> ring) : ring_(std::move(ring)) {}
  int size() const { return ring_->size(); }
  int index() const { return ring_->index(); }
  /// Sends the first pieces at once if no transfer precedes it.
  OperationPtr start(Transfer transfer);

 private:
  std::shared_ptr<Ring> ring_;
  OperationPtr last_;
};

/// Returns a tensor's memory for sending. Errors: RuntimeError for a tensor that is not on the CPU.
const char* readable(const at::Tensor& tensor);

/// A tensor's memory, written piece by piece. Data too large to stay cached until it is read bypasses the caches.
class Destination {
 public:
  /// Errors: as `readable`.
  explicit Destination(const at::Tensor& tensor);
  /// Copies `data`, unless it is in its place already.
  void write(int64_t offset, const char* data, int64_t bytes) const;

 private:
  char* memory_;
  bool past_cache_;
};

/// The rank of index `root` sends `tensor`, the others receive it.
Transfer broadcast_transfer(const at::Tensor& tensor, int root, int index);

}  // namespace deeptide::host
