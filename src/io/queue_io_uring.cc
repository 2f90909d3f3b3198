// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A queue that is one io_uring: transfers are submitted as they start, and collected by whoever waits.
#include <liburing.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <deque>
#include <map>
#include <stdexcept>
#include <thread>
#include <utility>

#include "io/queue.h"

namespace deeptide::io {
namespace {

/// Tells the errors of a kernel with too little memory, or with results to be taken first: nothing has failed.
bool is_transient(int error) { return error == EAGAIN || error == EBUSY || error == EINTR; }

/// A forked child shares the ring with its parent, so there each method but the destructor, which leaves it alone, is
/// an error.
class RingQueue : public Queue {
 public:
  RingQueue(io_uring ring, int depth, const RingFaults& faults) : ring_(ring), depth_(depth), faults_(faults) {}
  ~RingQueue() override {
    if (::getpid() != process_) return;
    while (num_flying_ > 0 || !waiting_.empty()) {  // the kernel must not write into freed buffers
      if (!collect()) break;
    }
    io_uring_queue_exit(&ring_);
  }
  RingQueue(const RingQueue&) = delete;

  Ticket start(const Transfer& transfer) override {
    check_process();
    waiting_.emplace_back(++last_, transfer);
    submit();
    return last_;
  }

  int wait(Ticket ticket) override {
    check_process();
    while (!results_.contains(ticket)) {
      if (!collect()) return EIO;
    }
    return results_.extract(ticket).mapped();
  }

  bool is_done(Ticket ticket) override {
    check_process();
    if (!results_.contains(ticket)) reap();
    return results_.contains(ticket);
  }

  const char* name() const override { return "io_uring"; }

 private:
  void check_process() const {
    if (::getpid() != process_) throw std::runtime_error("a forked child cannot use the files of the engine it left");
  }

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
      flying_[ticket] = transfer;
      ++num_flying_;
    }
    io_uring_submit(&ring_);
  }

  /// Waits for at least one transfer. Returns false if the ring itself failed.
  bool collect() {
    for (;;) {
      int error = faults_.refuse ? faults_.refuse() : 0;
      if (error == 0) error = -io_uring_submit_and_wait(&ring_, 1);
      if (error > 0 && !is_transient(error)) return false;
      if (reap() || error <= 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  /// Takes the results that have arrived, and starts again what the kernel put off. Returns whether there were any.
  bool reap() {
    bool any = false;
    io_uring_cqe* done = nullptr;
    while (io_uring_peek_cqe(&ring_, &done) == 0) {
      const Ticket ticket = io_uring_cqe_get_data64(done);
      const Transfer transfer = flying_.extract(ticket).mapped();
      const int result = faults_.answer ? faults_.answer(done->res) : done->res;
      if (result < 0 && is_transient(-result)) {
        waiting_.emplace_front(ticket, transfer);
      } else {
        results_[ticket] = result < 0 ? -result : (result == transfer.bytes ? 0 : EIO);
        any = true;
      }
      io_uring_cqe_seen(&ring_, done);
      --num_flying_;
    }
    submit();
    return any;
  }

  io_uring ring_;
  const int depth_;
  const RingFaults faults_;
  const pid_t process_ = ::getpid();
  int num_flying_ = 0;
  Ticket last_ = 0;
  std::deque<std::pair<Ticket, Transfer>> waiting_;
  std::map<Ticket, Transfer> flying_;
  std::map<Ticket, int> results_;
};

}  // namespace

std::unique_ptr<Queue> make_ring_queue(int depth, const RingFaults& faults) {
  io_uring ring{};
  if (io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0) < 0) return nullptr;
  return std::make_unique<RingQueue>(ring, depth, faults);
}

}  // namespace deeptide::io
