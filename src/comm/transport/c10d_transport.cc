// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs collectives on a c10d backend.
#include <algorithm>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/transport/pair_exchange.h"
#include "comm/transport/peer_lines.h"
#include "comm/transport/transport.h"
#include "device/torch_versions.h"
#include "device/unseen.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;

namespace {

class WorkOperation : public Operation {
 public:
  WorkOperation(c10::intrusive_ptr<c10d::Work> work, std::vector<Tensor> tensors)
      : work_(std::move(work)), tensors_(std::move(tensors)), on_device_(!tensors_.front().is_cpu()) {}

  bool ready() override { return work_->isCompleted(); }

  bool advance(milliseconds limit) override {
    try {
      if (on_device_) {
        work_->wait();  // orders the current stream after the collective
      } else {
        work_->wait(std::max(limit, milliseconds(1)));
      }
      return true;
    } catch (const std::exception& error) {
      if (!work_->isCompleted()) return false;  // late, not failed
      // The work may have completed just after the limit: then the error is the limit's, not the work's.
      if (work_->exception() == nullptr) return true;
      throw TransportError(std::string(error.what()).substr(0, 300));
    }
  }

  bool order_before(const device::Lane& lane) override {
    if (!on_device_) return false;
    const device::Lane::Scope scope(lane);
    work_->wait();
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<Tensor> tensors_;
  bool on_device_;
};

std::vector<Tensor> rows_of(const Tensor& flat, int64_t num_rows) {
  return flat.view({num_rows, flat.numel() / num_rows}).unbind(0);
}

OperationPtr follow(c10::intrusive_ptr<c10d::Work> work, std::vector<Tensor> tensors) {
  return std::make_shared<WorkOperation>(std::move(work), std::move(tensors));
}

class C10dTransport : public Transport {
 public:
  explicit C10dTransport(Network network) : backend_(network.backend), peers_(backend_), pairs_(std::move(network)) {}

  const char* name() const override { return "c10d"; }
  bool advances_alone() const override { return true; }

  OperationPtr all_gather(Tensor output, Tensor input, OwnRow own) override {
    if (!input.is_cpu()) return follow(backend_->_allgather_base(output, input), {output, input});
    const device::Unseen unseen;
    std::vector<Tensor> from = rows_of(output, num_ranks());
    if (own == OwnRow::left) from[backend_->getRank()] = input;
    return pairs_.start(std::vector<Tensor>(num_ranks(), input), from);
  }

  OperationPtr all_to_all(Tensor output, Tensor input, OwnRow own) override {
    if (!input.is_cpu()) {
      std::vector<int64_t> equal_splits;
      return follow(backend_->alltoall_base(output, input, equal_splits, equal_splits), {output, input});
    }
    const device::Unseen unseen;
    const std::vector<Tensor> to = rows_of(input, num_ranks());
    std::vector<Tensor> from = rows_of(output, num_ranks());
    if (own == OwnRow::left) from[backend_->getRank()] = to[backend_->getRank()];
    return pairs_.start(to, from);
  }

  OperationPtr reduce_scatter(Tensor output, Tensor input) override {
    const device::CollectiveStart start(input.is_cpu());
    return follow(backend_->_reduce_scatter_base(output, input), {output, input});
  }

  OperationPtr broadcast(Tensor tensor, int root) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<Tensor> tensors{tensor};
    const device::CollectiveStart start(tensor.is_cpu());
    return follow(backend_->broadcast(tensors, options), {tensor});
  }

  OperationPtr send(Tensor tensor, int to) override {
    if (tensor.numel() == 0) return nullptr;
    if (tensor.is_cpu()) return peers_.send(std::move(tensor), to);
    std::vector<Tensor> tensors{std::move(tensor)};
    return follow(backend_->send(tensors, to, /*tag=*/0), tensors);
  }

  OperationPtr receive(Tensor tensor, int from) override {
    if (tensor.numel() == 0) return nullptr;
    if (tensor.is_cpu()) return peers_.receive(std::move(tensor), from);
    std::vector<Tensor> tensors{std::move(tensor)};
    return follow(backend_->recv(tensors, from, /*tag=*/0), tensors);
  }

 private:
  int64_t num_ranks() const { return backend_->getSize(); }

  c10::intrusive_ptr<c10d::Backend> backend_;
  PeerLines peers_;
  PairExchange pairs_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(Network network) {
  return std::make_unique<C10dTransport>(std::move(network));
}

}  // namespace deeptide::comm
