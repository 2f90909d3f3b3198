// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A queue that is one io_uring: transfers are submitted as they start, and collected by whoever waits.
#include <liburing.h>

#include <cerrno>
#include <deque>
#include <map>
#include <utility>

#include "io/queue.h"

namespace deeptide::io {
namespace {

class RingQueue : public Queue {
 public:
  RingQueue(io_uring ring, int depth) : ring_(ring), depth_(depth) {}
  ~RingQueue() override {
    while (num_flying_ > 0 || !waiting_.empty()) {  // the kernel must not write into freed buffers
      if (!collect()) break;
    }
    io_uring_queue_exit(&ring_);
  }
  RingQueue(const RingQueue&) = delete;

  Ticket start(const Transfer& transfer) override {
    waiting_.emplace_back(++last_, transfer);
    submit();
    return last_;
  }

  int wait(Ticket ticket) override {
    while (!results_.contains(ticket)) {
      if (!collect()) return EIO;
    }
    return results_.extract(ticket).mapped();
  }

  bool is_done(Ticket ticket) override {
    if (!results_.contains(ticket)) reap();
    return results_.contains(ticket);
  }

  const char* name() const override { return "io_uring"; }

 private:
  void submit() {
    for (; num_flying_ < depth_ && !waiting_.empty(); waiting_.pop_front()) {
      const auto& [ticket, transfer] = waiting_.front();
      io_uring_sqe* request = io_uring_get_sqe(&ring_);
      if (request == nullptr) break;
      const auto size = static_cast<unsigned>(transfer.bytes);
      const auto at = static_cast<uint64_t>(transfer.at);
      if (transfer.read) {
        io_uring_prep_read(request, transfer.fd, transfer.data, size, at);
      } else {
        io_uring_prep_write(request, transfer.fd, transfer.data, size, at);
      }
      io_uring_sqe_set_data64(request, ticket);
      sizes_[ticket] = transfer.bytes;
      ++num_flying_;
    }
    io_uring_submit(&ring_);
  }

  /// Waits for at least one transfer. Returns false if the ring itself failed.
  bool collect() {
    int error = 0;
    do {
      error = io_uring_submit_and_wait(&ring_, 1);
    } while (error == -EINTR);
    if (error < 0) return false;
    reap();
    return true;
  }

  /// Takes the results that have arrived.
  void reap() {
    io_uring_cqe* done = nullptr;
    while (io_uring_peek_cqe(&ring_, &done) == 0) {
      const Ticket ticket = io_uring_cqe_get_data64(done);
      const int64_t bytes = sizes_.extract(ticket).mapped();
      results_[ticket] = done->res < 0 ? -done->res : (done->res == bytes ? 0 : EIO);
      io_uring_cqe_seen(&ring_, done);
      --num_flying_;
    }
    submit();
  }

  io_uring ring_;
  int depth_;
  int num_flying_ = 0;
  Ticket last_ = 0;
  std::deque<std::pair<Ticket, Transfer>> waiting_;
  std::map<Ticket, int64_t> sizes_;  // of those under way
  std::map<Ticket, int> results_;
};

}  // namespace

std::unique_ptr<Queue> make_ring_queue(int depth) {
  io_uring ring{};
  if (io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0) < 0) return nullptr;
  return std::make_unique<RingQueue>(ring, depth);
}

}  // namespace deeptide::io
