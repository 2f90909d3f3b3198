// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives through a ring of slots: each rank copies in what it has, piece by piece, and out what it wants.
#include <algorithm>
#include <cstring>

#include "comm/host_transfer.h"
#include "comm/transport.h"

namespace deeptide::comm {

using at::Tensor;

namespace {

class HostTransport : public Transport {
 public:
  explicit HostTransport(std::shared_ptr<Host> host) : channel_(std::move(host)) {}

  OperationPtr all_gather(Tensor output, Tensor input) override {
    const int64_t row = static_cast<int64_t>(input.nbytes());
    return channel_.start({{output, input}, readable(input), row, [to = writable(output), row](const Piece& piece) {
                             std::memcpy(to + piece.peer * row + piece.offset, piece.data, piece.bytes);
                           }});
  }

  OperationPtr all_to_all(Tensor output, Tensor input) override {
    const int64_t row = static_cast<int64_t>(input.nbytes()) / channel_.size();
    auto take = [to = writable(output), row, mine = channel_.index() * row](const Piece& piece) {
      const int64_t first = std::max(piece.offset, mine);
      const int64_t last = std::min(piece.offset + piece.bytes, mine + row);
      if (first < last) {
        std::memcpy(to + piece.peer * row + first - mine, piece.data + first - piece.offset, last - first);
      }
    };
    return channel_.start({{output, input}, readable(input), static_cast<int64_t>(input.nbytes()), take});
  }

  /// In rank order, in fp32: more exact than asked for.
  OperationPtr reduce_scatter(Tensor output, Tensor input) override {
    return reduce_scatter_in_order(*this, channel_.size(), output, input);
  }

  OperationPtr broadcast(Tensor tensor, int root) override {
    return channel_.start(broadcast_transfer(tensor, root, channel_.index()));
  }

 private:
  HostChannel channel_;
};

}  // namespace

std::unique_ptr<Transport> make_host_transport(std::shared_ptr<Host> host) {
  return std::make_unique<HostTransport>(std::move(host));
}

}  // namespace deeptide::comm
