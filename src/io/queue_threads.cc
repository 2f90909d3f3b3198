// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A queue served by threads, with one pread or pwrite at a time in each; by its caller where the system has no thread.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/resources.h"
#include "io/queue.h"

namespace deeptide::io {
namespace {

constexpr int kMostThreads = 8;

int perform(const Transfer& transfer) {
  const auto size = static_cast<size_t>(transfer.bytes);
  ssize_t done = 0;
  do {
    done = transfer.read ? ::pread(transfer.fd, transfer.data, size, transfer.at)
                         : ::pwrite(transfer.fd, transfer.data, size, transfer.at);
  } while (done < 0 && errno == EINTR);
  if (done < 0) return errno;
  return done == transfer.bytes ? 0 : EIO;
}

/// A forked child has none of the threads and leaves it alone.
class ThreadQueue : public Queue {
 public:
  explicit ThreadQueue(int depth) : most_(static_cast<size_t>(std::clamp(depth, 1, kMostThreads))) {}
  ~ThreadQueue() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  Ticket start(const Transfer& transfer) override {
    std::lock_guard lock(mutex_);
    waiting_.emplace_back(++last_, transfer);
    if (waiting_.size() > idle_ && threads_.size() < most_) add_thread();
    if (threads_.empty()) {
      results_[last_] = perform(transfer);  // no thread can be had: slower, but it goes on
      waiting_.pop_back();
    } else {
      changed_.notify_all();
    }
    return last_;
  }

  int wait(Ticket ticket) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_.contains(ticket); });
    return results_.extract(ticket).mapped();
  }

  bool is_done(Ticket ticket) override {
    std::lock_guard lock(mutex_);
    return results_.contains(ticket);
  }

  const char* name() const override { return "threads"; }

 private:
  /// Each has a stack, so there are no more than transfers were under way at a time.
  void add_thread() {
    std::thread thread = start_thread([this] { serve(); });
    if (thread.joinable()) {
      threads_.push_back(std::move(thread));
    } else {
      most_ = threads_.size();  // the system has no more: fewer serve as well
    }
  }

  /// Ends only once nothing waits.
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      --idle_;
      if (waiting_.empty()) return;
      const auto [ticket, transfer] = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const int error = perform(transfer);
      lock.lock();
      results_[ticket] = error;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Ticket, Transfer>> waiting_;
  std::map<Ticket, int> results_;
  Ticket last_ = 0;
  bool stop_ = false;
  size_t idle_ = 0;  // threads that wait for a transfer
  size_t most_;      // threads
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Queue> make_thread_queue(int depth) { return std::make_unique<ThreadQueue>(depth); }

std::unique_ptr<Queue> make_queue(int depth) {
  auto ring = make_ring_queue(depth);
  return ring ? std::move(ring) : make_thread_queue(depth);
}

}  // namespace deeptide::io
