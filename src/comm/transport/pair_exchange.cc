// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts sends and receives, and waits for them on a thread.
#include "comm/transport/pair_exchange.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace deeptide::comm {

using at::Tensor;
using c10d::Work;

namespace {

// Transfers of one tag between two ranks arrive in order; 0: those of Transport::send. Pieces have the tags from here.
constexpr int kTag = 1;
constexpr int64_t kLeastPiece = 256 << 10;  // bytes
constexpr int64_t kLeastTimed = 128 << 10;  // bytes of a row whose halves are timed
constexpr double kBlocked = 100e-6;         // seconds: who waited so long was there when the bytes came
constexpr size_t kLongestText = 300;

/// Spreads consecutive numbers: no pattern of a step's exchanges meets one of theirs.
uint64_t scattered(uint64_t number) {
  number = (number + 1) * 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  return number ^ (number >> 27);
}

}  // namespace

PairExchange::PairExchange(Network network) : network_(std::move(network)) {
  if (network_.backend->getBackendName() == "gloo") line_.start();
}

class PairExchange::Exchange : public WaitingLine::Transfer {
 public:
  Exchange(const PairExchange& parent, const std::vector<Tensor>& to, const std::vector<Tensor>& from)
      : network_(parent.network_),
        first_step_(first_step(parent.num_started_)),
        to_self_(to[network_.backend->getRank()]),
        from_self_(from[network_.backend->getRank()]) {
    try {
      start(to, from);
    } catch (const std::exception& error) {  // a connection that broke earlier: who waits is told
      failure_ = std::string(error.what()).substr(0, kLongestText);
    }
  }

  void complete() override {
    std::string failure = failure_;
    try {
      if (to_self_.const_data_ptr() != from_self_.const_data_ptr()) {
        std::memcpy(from_self_.mutable_data_ptr(), to_self_.const_data_ptr(), to_self_.nbytes());
      }
      wait_for_all();
    } catch (const std::exception& error) {
      failure = std::string(error.what()).substr(0, kLongestText);
    }
    if (aborted_) return;
    end_with(std::move(failure), [this] {
      transfers_.clear();
      tensors_.clear();
      to_self_ = from_self_ = Tensor();
    });
  }

  void abort() override {
    aborted_ = true;
    const std::lock_guard lock(mutex_);
    for (const Transfer& transfer : transfers_) transfer.work->abort();
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Transfer {
    int peer;
    int64_t bytes;
    c10::intrusive_ptr<Work> work;
  };

  static double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

  /// The distance, in ranks, of the peers with whom an exchange begins.
  int first_step(size_t number) const {
    const int others = network_.backend->getSize() - 1;
    return others < 2 ? 1 : 1 + static_cast<int>(scattered(number) % static_cast<uint64_t>(others));
  }

  /// Receives first: a sender that finds its receive posted need not ask. Each rank begins with another peer, and what
  /// it receives first is what that peer sends first.
  void start(const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    c10d::Backend& backend = *network_.backend;
    const int own = backend.getRank(), num_ranks = backend.getSize();
    for (int i = 0; i < num_ranks - 1; ++i) {
      const int peer = (own + num_ranks - step_at(i)) % num_ranks;
      const size_t cut = add_row(peer, from[peer], i == 0,
                                 [&](std::vector<Tensor>& piece, int tag) { return backend.recv(piece, peer, tag); });
      if (i > 0) continue;
      num_first_half_ = cut;
      num_timed_ = transfers_.size();
    }
    num_receives_ = transfers_.size();
    for (int i = 0; i < num_ranks - 1; ++i) {
      const int peer = (own + step_at(i)) % num_ranks;
      add_row(peer, to[peer], i == 0,
              [&](std::vector<Tensor>& piece, int tag) { return backend.send(piece, peer, tag); });
    }
  }

  int step_at(int i) const { return 1 + (first_step_ - 1 + i) % (network_.backend->getSize() - 1); }

  /// Large rows go over all devices at once, a piece over each; the first row in two halves, one after the other, if it
  /// is large. Both ends cut alike. Returns the transfers of the first half, or 0.
  template <typename Start>
  size_t add_row(int peer, const Tensor& row, bool is_first, const Start& start) {
    if (row.numel() == 0) return 0;
    const auto bytes = static_cast<int64_t>(row.nbytes());
    const int64_t pieces = std::clamp<int64_t>(bytes / kLeastPiece, 1, network_.num_devices);
    if (!is_first || bytes < kLeastTimed) {
      add_pieces(peer, row, pieces, start);
      return 0;
    }
    const Tensor flat = row.view({-1});
    const int64_t half = flat.numel() / 2;
    add_pieces(peer, flat.narrow(0, 0, half), pieces, start);
    add_pieces(peer, flat.narrow(0, half, flat.numel() - half), pieces, start);
    return static_cast<size_t>(pieces);
  }

  template <typename Start>
  void add_pieces(int peer, const Tensor& row, int64_t pieces, const Start& start) {
    for (int64_t i = 0, begin = 0; i < pieces; ++i) {
      const int64_t end = row.numel() * (i + 1) / pieces;
      auto& piece = tensors_.emplace_back(1, pieces == 1 ? row : row.view({-1}).narrow(0, begin, end - begin));
      const auto bytes = static_cast<int64_t>(piece.front().nbytes());
      transfers_.push_back({peer, bytes, start(piece, kTag + static_cast<int>(i))});
      begin = end;
    }
  }

  /// The halves of the row that comes first travel one after the other. If the thread waited for both, the time between
  /// them is the second's: neither lateness of the sender nor what was under way before is in it.
  void wait_for_all() {
    if (!failure_.empty()) return;
    const auto begin = Clock::now();
    wait_for_receives(0, num_first_half_);
    const auto middle = Clock::now();
    wait_for_receives(num_first_half_, num_timed_);
    const auto end = Clock::now();
    if (network_.links && num_first_half_ > 0 && !aborted_ && seconds(middle - begin) > kBlocked &&
        seconds(end - middle) > kBlocked) {
      int64_t bytes = 0;
      for (size_t i = num_first_half_; i < num_timed_; ++i) bytes += transfers_[i].bytes;
      network_.links->add_sample(network_.ranks[transfers_.front().peer], bytes, seconds(end - middle));
    }
    wait_for_receives(num_timed_, num_receives_);
    for (size_t i = num_receives_; i < transfers_.size() && !aborted_; ++i) {
      transfers_[i].work->wait();
      if (network_.links) network_.links->add_sent(network_.ranks[transfers_[i].peer], transfers_[i].bytes);
    }
  }

  void wait_for_receives(size_t first, size_t end) {
    for (size_t i = first; i < end && !aborted_; ++i) {
      transfers_[i].work->wait();
      if (network_.links) network_.links->add_received(network_.ranks[transfers_[i].peer], transfers_[i].bytes);
    }
  }

  const Network& network_;
  const int first_step_;
  Tensor to_self_, from_self_;
  std::deque<std::vector<Tensor>> tensors_;  // outlive the works, which refer to their memory
  std::vector<Transfer> transfers_;          // what is received first
  size_t num_receives_ = 0;
  size_t num_first_half_ = 0;  // of the receives: the first row's first half; 0: it is not timed
  size_t num_timed_ = 0;       // of the receives: the first row
  std::atomic<bool> aborted_ = false;
};

host::OperationPtr PairExchange::start(const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
  auto exchange = std::make_shared<Exchange>(*this, to, from);
  ++num_started_;
  line_.add(exchange);
  return exchange;
}

}  // namespace deeptide::comm
