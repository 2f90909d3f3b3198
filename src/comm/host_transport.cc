// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives through a ring of slots: each rank copies in what it has, piece by piece, and out what it wants.
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstring>

#include "comm/host_transfer.h"
#include "comm/ordered_rows.h"
#include "comm/transport.h"

namespace deeptide::comm {

using at::Tensor;

namespace {

class HostTransport : public Transport {
 public:
  explicit HostTransport(std::shared_ptr<Host> host) : channel_(std::move(host)) {}

  OperationPtr all_gather(Tensor output, Tensor input) override {
    const int64_t row = static_cast<int64_t>(input.nbytes());
    return channel_.start({{output, input}, bytes_of(input), row, [to = writable(output), row](const Piece& piece) {
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
    return channel_.start({{output, input}, bytes_of(input), static_cast<int64_t>(input.nbytes()), take});
  }

  /// In rank order, in fp32: more exact than asked for.
  OperationPtr reduce_scatter(Tensor output, Tensor input) override {
    Tensor rows = at::empty_like(input);
    const int64_t size = channel_.size();
    return then(all_to_all(rows, input), [rows, output, size] { add_rows_in_order(rows, size, output); });
  }

  OperationPtr broadcast(Tensor tensor, int root) override {
    const bool sends = channel_.index() == root;
    auto take = [to = writable(tensor), root, sends](const Piece& piece) {
      if (piece.peer == root && !sends) std::memcpy(to + piece.offset, piece.data, piece.bytes);
    };
    return channel_.start({{tensor}, sends ? bytes_of(tensor) : nullptr, static_cast<int64_t>(tensor.nbytes()), take});
  }

 private:
  static const char* bytes_of(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }
  static char* writable(const Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

  HostChannel channel_;
};

}  // namespace

std::unique_ptr<Transport> make_host_transport(std::shared_ptr<Host> host) {
  return std::make_unique<HostTransport>(std::move(host));
}

}  // namespace deeptide::comm
