// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs collectives through a ring of slots: each rank copies its data in, piece by piece, and what it needs out.
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>

#include "base/invariant.h"
#include "comm/transport/ordered_rows.h"
#include "comm/transport/transport.h"
#include "host/pipe.h"
#include "host/transfer.h"

namespace deeptide::comm {

using at::Tensor;

namespace {

class HostTransport : public Transport {
 public:
  HostTransport(const std::shared_ptr<host::Host>& host, PeerTraffic peers) : channel_(host) {
    if (peers == PeerTraffic::yes) pipes_ = std::make_unique<host::Pipes>(host);
  }

  const char* name() const override { return "shared memory"; }
  bool crosses_hosts() const override { return false; }

  OperationPtr all_gather(Tensor output, Tensor input, OwnRow /*own*/) override {
    const int64_t row = static_cast<int64_t>(input.nbytes());
    auto take = [to = host::Destination(output), row](const host::Pieces& pieces) {
      for (size_t peer = 0; peer < pieces.data.size(); ++peer) {
        to.write(static_cast<int64_t>(peer) * row + pieces.offset, pieces.data[peer], pieces.bytes);
      }
    };
    return channel_.start({{output, input}, host::readable(input), row, take});
  }

  OperationPtr all_to_all(Tensor output, Tensor input, OwnRow /*own*/) override {
    const int64_t row = static_cast<int64_t>(input.nbytes()) / channel_.size();
    auto take = [to = host::Destination(output), row](const host::Pieces& mine, int64_t at) {
      for (size_t peer = 0; peer < mine.data.size(); ++peer) {
        to.write(static_cast<int64_t>(peer) * row + at, mine.data[peer], mine.bytes);
      }
    };
    return scatter(output, input, take);
  }

  /// Sums in rank order, in fp32: more exact than required. Rows that have arrived from all ranks are summed in place.
  OperationPtr reduce_scatter(Tensor output, Tensor input) override {
    if (output.is_alias_of(input)) return reduce_scatter_in_order(*this, channel_.size(), output, input);
    const auto item = static_cast<int64_t>(input.element_size());
    auto take = [output, item, options = input.options()](const host::Pieces& mine, int64_t at) {
      std::vector<Tensor> rows;
      for (const char* data : mine.data)
        rows.push_back(at::from_blob(const_cast<char*>(data), {mine.bytes / item}, options));
      add_rows_in_order(rows, output.narrow(0, at / item, mine.bytes / item));
    };
    return scatter(output, input, take);
  }

  OperationPtr broadcast(Tensor tensor, int root) override {
    return channel_.start(host::broadcast_transfer(tensor, root, channel_.index()));
  }

  OperationPtr send(Tensor tensor, int to) override { return pipes().send(std::move(tensor), to); }

  OperationPtr receive(Tensor tensor, int from) override { return pipes().receive(std::move(tensor), from); }

 private:
  host::Pipes& pipes() const {
    DEEPTIDE_INVARIANT(pipes_ != nullptr, "the channel was made without PeerTraffic::yes");
    return *pipes_;
  }

  /// Sends each rank its row of `input`; `take` gets arrived pieces of this rank's rows and their offset in a row.
  OperationPtr scatter(const Tensor& output, const Tensor& input,
                       const std::function<void(const host::Pieces&, int64_t)>& take) {
    const int64_t row = static_cast<int64_t>(input.nbytes()) / channel_.size(), begin = channel_.index() * row;
    auto take_own = [take, begin, end = begin + row](const host::Pieces& pieces) {
      const int64_t first = std::max(pieces.offset, begin), last = std::min(pieces.offset + pieces.bytes, end);
      if (first >= last) return;
      host::Pieces mine{first, last - first, pieces.data};
      for (const char*& data : mine.data) data += first - pieces.offset;
      take(mine, first - begin);
    };
    return channel_.start(
        {{output, input}, host::readable(input), static_cast<int64_t>(input.nbytes()), take_own, begin, begin + row});
  }

  host::Channel channel_;
  std::unique_ptr<host::Pipes> pipes_;  // null: no send or receive
};

}  // namespace

std::unique_ptr<Transport> make_host_transport(std::shared_ptr<host::Host> host, PeerTraffic peers) {
  return std::make_unique<HostTransport>(host, peers);
}

}  // namespace deeptide::comm
