// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts transfers on the caller's thread and waits for them on the line's.
#include "comm/transport/peer_lines.h"

#include <atomic>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace deeptide::comm {

using at::Tensor;
using WorkHandle = c10::intrusive_ptr<c10d::Work>;

namespace {

constexpr int kPeerTag = 0;  // transfers between two ranks arrive in order; PairExchange has the tags from 1
constexpr size_t kLongestCause = 300;

class PeerTransfer : public WaitingLine::Transfer {
 public:
  explicit PeerTransfer(Tensor tensor) : tensors_{std::move(tensor)} {}

  template <typename Start>
  void start(const Start& start) {
    try {
      work_ = start(tensors_);
    } catch (const std::exception& error) {  // a connection that broke earlier: who waits is told
      failed_start_ = std::string(error.what()).substr(0, kLongestCause);
    }
  }

  void complete() override {
    std::string failure = failed_start_;
    try {
      if (work_ && !aborted_) work_->wait();
    } catch (const std::exception& error) {
      failure = std::string(error.what()).substr(0, kLongestCause);
    }
    if (aborted_) return;
    end_with(std::move(failure), [this] {
      work_.reset();
      tensors_.clear();
    });
  }

  void abort() override {
    aborted_ = true;
    const std::lock_guard lock(mutex_);
    if (!work_) return;
    try {
      work_->abort();
    } catch (const std::exception&) {  // a backend that cannot abort ends at its own timeout
    }
  }

 private:
  std::vector<Tensor> tensors_;  // one; outlives the work, which refers to its memory
  WorkHandle work_;              // null: the start has failed
  std::string failed_start_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

template <typename Start>
OperationPtr PeerLines::add(WaitingLine& line, Tensor tensor, const Start& start) {
  auto transfer = std::make_shared<PeerTransfer>(std::move(tensor));
  transfer->start(start);
  line.add(transfer);
  return transfer;
}

OperationPtr PeerLines::send(Tensor tensor, int to) {
  return add(to_[to], std::move(tensor),
             [&](std::vector<Tensor>& tensors) { return backend_->send(tensors, to, kPeerTag); });
}

OperationPtr PeerLines::receive(Tensor tensor, int from) {
  return add(from_[from], std::move(tensor),
             [&](std::vector<Tensor>& tensors) { return backend_->recv(tensors, from, kPeerTag); });
}

}  // namespace deeptide::comm
