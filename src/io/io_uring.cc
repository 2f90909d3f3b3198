// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Uses one ring per file, in which each completed request makes room for the next block.
#include <liburing.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "io/io_engine.h"

namespace deeptide::io {
namespace {

constexpr int kPatience_s = 120;  // limit without a completion
constexpr int kDrain_s = 10;

/// A ring and its requests in flight.
class Ring {
 public:
  explicit Ring(const Pass& pass) : pass_(pass) {
    const int error = io_uring_queue_init(static_cast<unsigned>(pass.blocks.size()), &ring_, 0);
    if (error < 0) throw std::system_error(-error, std::generic_category(), "io_uring_queue_init");
    places_.resize(pass.blocks.size());
  }
  // Drains the ring after an error, because the kernel must not write into freed buffers.
  ~Ring() {
    io_uring_cqe* done = nullptr;
    while (num_flying_ > 0 && wait(&done, kDrain_s) >= 0) {
      io_uring_cqe_seen(&ring_, done);
      --num_flying_;
    }
    io_uring_queue_exit(&ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void start(size_t buffer, int64_t at) {
    io_uring_sqe* request = io_uring_get_sqe(&ring_);  // the ring has one per buffer
    if (!pass_.read) pass_.prepare(buffer, at);
    const auto size = static_cast<unsigned>(pass_.block_bytes);
    if (pass_.read) {
      io_uring_prep_read(request, pass_.fd, pass_.blocks[buffer], size, at);
    } else {
      io_uring_prep_write(request, pass_.fd, pass_.blocks[buffer], size, at);
    }
    io_uring_sqe_set_data64(request, buffer);
    places_[buffer] = at;
    ++num_flying_;
  }

  bool idle() const { return num_flying_ == 0; }

  /// Submits the started requests and waits for at least one; calls use(buffer) for each that has completed.
  void collect(const std::function<void(size_t)>& use) {
    io_uring_cqe* done = nullptr;
    const int error = wait(&done, kPatience_s);
    if (error < 0) fail(error == -ETIME ? ETIMEDOUT : -error);
    while (io_uring_peek_cqe(&ring_, &done) == 0) {
      const size_t buffer = io_uring_cqe_get_data64(done);
      const int result = done->res;
      io_uring_cqe_seen(&ring_, done);
      --num_flying_;
      if (result != pass_.block_bytes) fail(result < 0 ? -result : EIO);
      if (pass_.read) pass_.inspect(buffer, places_[buffer]);
      use(buffer);
    }
  }

 private:
  int wait(io_uring_cqe** done, int seconds) {
    __kernel_timespec limit{seconds, 0};
    int error = 0;
    do {
      error = io_uring_submit_and_wait_timeout(&ring_, done, 1, &limit, nullptr);
    } while (error == -EINTR);
    return error;
  }
  [[noreturn]] void fail(int error) const { throw std::system_error(error, std::generic_category(), pass_.path); }

  const Pass& pass_;
  io_uring ring_{};
  std::vector<int64_t> places_;
  size_t num_flying_ = 0;
};

}  // namespace

void transfer_by_io_uring(const Pass& pass) {
  Ring ring(pass);
  int64_t next = 0;
  const auto start_next = [&](size_t buffer) {
    if (next == pass.bytes) return;
    ring.start(buffer, next);
    next += pass.block_bytes;
  };
  for (size_t buffer = 0; buffer < pass.blocks.size(); ++buffer) start_next(buffer);
  while (!ring.idle()) ring.collect(start_next);
}

std::string io_uring_obstacle() {
  io_uring ring{};
  const int error = io_uring_queue_init(1, &ring, 0);
  if (error < 0) return std::strerror(-error);
  io_uring_queue_exit(&ring);
  return "";
}

bool has_io_uring() { return true; }

}  // namespace deeptide::io
