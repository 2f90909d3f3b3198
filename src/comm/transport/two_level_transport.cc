// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Uses c10d between hosts, among ranks of one index, and shared memory within a host.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "base/invariant.h"
#include "comm/transport/ordered_rows.h"
#include "comm/transport/transport.h"
#include "host/pipe.h"
#include "host/transfer.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;

namespace {

/// Runs the rail first; then, once all earlier operations are done, the transfer within the host.
class TwoLevelOperation : public Operation {
 public:
  TwoLevelOperation(OperationPtr rail, OperationPtr before, std::function<OperationPtr()> start_local)
      : rail_(std::move(rail)), before_(std::move(before)), start_local_(std::move(start_local)) {}

  bool ready() override {
    if (local_) return local_->ready();
    return (!before_ || before_->ready()) && (!rail_ || rail_->ready()) && advance(milliseconds(0));
  }

  bool advance(milliseconds limit) override {
    if (before_) {
      if (!before_->advance(limit)) return false;
      before_.reset();
    }
    if (rail_) {
      if (!rail_->advance(limit)) return false;
      rail_.reset();
    }
    if (!local_) local_ = std::exchange(start_local_, nullptr)();
    return local_->advance(limit);
  }

 private:
  OperationPtr rail_;
  OperationPtr before_;
  std::function<OperationPtr()> start_local_;
  OperationPtr local_;
};

class TwoLevelTransport : public Transport {
 public:
  TwoLevelTransport(const std::shared_ptr<host::Host>& host, Network rail, std::optional<Network> peers)
      : host_(host), rail_(make_c10d_transport(std::move(rail))), channel_(host) {
    if (peers) {
      peers_ = make_c10d_transport(*std::move(peers));
      pipes_ = std::make_unique<host::Pipes>(host);
    }
    for (const auto& ranks : host_->hosts()) order_.insert(order_.end(), ranks.begin(), ranks.end());
  }

  const char* name() const override { return "two levels"; }

  OperationPtr all_gather(Tensor output, Tensor input, OwnRow /*own*/) override {
    const int64_t hosts = num_hosts(), row = static_cast<int64_t>(input.nbytes());
    Tensor column = at::empty({hosts * input.numel()}, input.options());  // this index's rows, host by host
    auto place = [this, output, row, to = host::Destination(output)](const host::Pieces& pieces) {
      for_rows(pieces, row, [&](int peer, int64_t host, int64_t offset, const char* data, int64_t bytes) {
        to.write(host_->hosts()[host][peer] * row + offset, data, bytes);
      });
    };
    return then_local(rail_->all_gather(column, input, OwnRow::copied),
                      {{output, column}, host::readable(column), hosts * row, place});
  }

  OperationPtr all_to_all(Tensor output, Tensor input, OwnRow /*own*/) override {
    const int64_t local = channel_.size(), row = static_cast<int64_t>(input.nbytes()) / num_ranks();
    const Tensor sent = by_host(input);
    Tensor received = at::empty_like(sent);  // (hosts, local, row): rows from this index of each host for this host
    auto place = [this, output, row, local, to = host::Destination(output)](const host::Pieces& pieces) {
      for_rows(pieces, row, [&](int peer, int64_t at, int64_t offset, const char* data, int64_t bytes) {
        if (at % local != channel_.index()) return;
        to.write(host_->hosts()[at / local][peer] * row + offset, data, bytes);
      });
    };
    return then_local(rail_->all_to_all(received, sent, OwnRow::copied),
                      {{output, received}, host::readable(received), static_cast<int64_t>(received.nbytes()), place});
  }

  OperationPtr reduce_scatter(Tensor output, Tensor input) override {
    return reduce_scatter_in_order(*this, num_ranks(), output, input);
  }

  OperationPtr broadcast(Tensor tensor, int root) override {
    const int64_t place = std::find(order_.begin(), order_.end(), root) - order_.begin();
    const int root_host = static_cast<int>(place / channel_.size()),
              root_index = static_cast<int>(place % channel_.size());
    auto rail = channel_.index() == root_index ? rail_->broadcast(tensor, root_host) : nullptr;
    return then_local(std::move(rail), host::broadcast_transfer(tensor, root_index, channel_.index()));
  }

  OperationPtr send(Tensor tensor, int to) override {
    const int here = index_here(to);
    return here >= 0 ? pipes_->send(std::move(tensor), here) : peers_->send(std::move(tensor), to);
  }
  OperationPtr receive(Tensor tensor, int from) override {
    const int here = index_here(from);
    return here >= 0 ? pipes_->receive(std::move(tensor), here) : peers_->receive(std::move(tensor), from);
  }
  Transport* rail() override { return rail_.get(); }

 private:
  /// The index on this host of a rank of the team; -1: it is on another host.
  int index_here(int rank) const {
    DEEPTIDE_INVARIANT(pipes_ != nullptr, "the channel was made without PeerTraffic::yes");
    const auto& here = host_->ranks();
    const auto found = std::find(here.begin(), here.end(), rank);
    return found == here.end() ? -1 : static_cast<int>(found - here.begin());
  }
  int64_t num_hosts() const { return static_cast<int64_t>(host_->hosts().size()); }
  int64_t num_ranks() const { return static_cast<int64_t>(order_.size()); }

  OperationPtr then_local(OperationPtr rail, host::Transfer transfer) {
    auto start = [this, transfer = std::move(transfer)] { return channel_.start(transfer); };
    last_ = std::make_shared<TwoLevelOperation>(std::move(rail), last_, std::move(start));
    last_->ready();
    return last_;
  }

  /// Calls `use(peer, row, offset in it, data, bytes)` for each row of `row` bytes that each rank's piece touches.
  template <typename Use>
  static void for_rows(const host::Pieces& pieces, int64_t row, const Use& use) {
    for (int peer = 0; peer < static_cast<int>(pieces.data.size()); ++peer) {
      for (int64_t at = pieces.offset; at < pieces.offset + pieces.bytes;) {
        const int64_t end = std::min((at / row + 1) * row, pieces.offset + pieces.bytes);
        use(peer, at / row, at % row, pieces.data[peer] + at - pieces.offset, end - at);
        at = end;
      }
    }
  }

  /// Returns the input's rows ordered by host; the input itself if the ranks are numbered so.
  Tensor by_host(const Tensor& input) const {
    if (std::is_sorted(order_.begin(), order_.end())) return input;
    const Tensor rows = input.view({num_ranks(), input.numel() / num_ranks()});
    std::vector<Tensor> ordered;
    for (int rank : order_) ordered.push_back(rows[rank]);
    return at::cat(ordered);
  }

  std::shared_ptr<host::Host> host_;
  std::unique_ptr<Transport> rail_;
  host::Channel channel_;
  std::vector<int> order_;  // ranks, host by host
  OperationPtr last_;
  std::unique_ptr<Transport> peers_;    // null: no send or receive
  std::unique_ptr<host::Pipes> pipes_;  // to the ranks of this host; null: likewise
};

}  // namespace

std::unique_ptr<Transport> make_two_level_transport(std::shared_ptr<host::Host> host, Network rail,
                                                    std::optional<Network> peers) {
  return std::make_unique<TwoLevelTransport>(host, std::move(rail), std::move(peers));
}

}  // namespace deeptide::comm
