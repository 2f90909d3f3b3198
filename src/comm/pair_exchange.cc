// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts sends and receives, and waits for them on a thread.
#include "comm/pair_exchange.h"

#include <atomic>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/awaited_operation.h"

namespace deeptide::comm {

using at::Tensor;
using c10d::Work;

namespace {

constexpr int kTag = 1;  // transfers of one tag between two ranks arrive in order; 0: those of Transport::send
constexpr size_t kLongestText = 300;

}  // namespace

class PairExchange::Exchange : public AwaitedOperation {
 public:
  Exchange(c10d::Backend& backend, const std::vector<Tensor>& to, const std::vector<Tensor>& from)
      : to_self_(to[backend.getRank()]), from_self_(from[backend.getRank()]) {
    try {
      start(backend, to, from);
    } catch (const std::exception& error) {  // a connection that broke earlier: who waits is told
      failure_ = std::string(error.what()).substr(0, kLongestText);
    }
  }

  /// Waits for the transfers; on the exchange's thread. `abort` ends it early.
  void complete() {
    std::string failure = failure_;
    try {
      if (to_self_.const_data_ptr() != from_self_.const_data_ptr()) {
        std::memcpy(from_self_.mutable_data_ptr(), to_self_.const_data_ptr(), to_self_.nbytes());
      }
      for (size_t i = 0; i < works_.size() && failure.empty() && !aborted_; ++i) works_[i]->wait();
    } catch (const std::exception& error) {
      failure = std::string(error.what()).substr(0, kLongestText);
    }
    if (aborted_) return;
    end_with(std::move(failure), [this] {
      works_.clear();
      tensors_.clear();
      to_self_ = from_self_ = Tensor();
    });
  }

  void abort() {
    aborted_ = true;
    const std::lock_guard lock(mutex_);
    for (const auto& work : works_) work->abort();
  }

 private:
  /// Receives first: a sender that finds its receive posted need not ask. Each rank begins with another peer.
  void start(c10d::Backend& backend, const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    const int own = backend.getRank(), num_ranks = backend.getSize();
    for (int step = 1; step < num_ranks; ++step) {
      const int peer = (own + num_ranks - step) % num_ranks;
      if (from[peer].numel() == 0) continue;
      works_.push_back(backend.recv(tensors_.emplace_back(1, from[peer]), peer, kTag));
    }
    for (int step = 1; step < num_ranks; ++step) {
      const int peer = (own + step) % num_ranks;
      if (to[peer].numel() == 0) continue;
      works_.push_back(backend.send(tensors_.emplace_back(1, to[peer]), peer, kTag));
    }
  }

  Tensor to_self_, from_self_;
  std::deque<std::vector<Tensor>> tensors_;  // outlive the works, which refer to their memory
  std::vector<c10::intrusive_ptr<Work>> works_;
  std::atomic<bool> aborted_ = false;
};

PairExchange::PairExchange(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

PairExchange::~PairExchange() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (!queue_.empty()) queue_.front()->abort();
    changed_.notify_all();
  }
  thread_.join();
}

host::OperationPtr PairExchange::start(const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });  // not before: a device's backend needs none
  auto exchange = std::make_shared<Exchange>(*backend_, to, from);
  const std::lock_guard lock(mutex_);
  queue_.push_back(exchange);
  changed_.notify_all();
  return exchange;
}

void PairExchange::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const auto front = queue_.front();
    lock.unlock();
    front->complete();
    lock.lock();
    queue_.pop_front();
  }
}

}  // namespace deeptide::comm
