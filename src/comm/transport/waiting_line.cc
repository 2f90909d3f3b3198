// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Takes transfers from a queue.
#include "comm/transport/waiting_line.h"

#include "base/resources.h"

namespace deeptide::comm {

WaitingLine::~WaitingLine() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (!queue_.empty()) queue_.front()->abort();
    changed_.notify_all();
  }
  thread_.join();
}

void WaitingLine::start() {
  if (!thread_.joinable()) thread_ = start_needed_thread("exchanges between ranks", [this] { run(); });
}

void WaitingLine::add(std::shared_ptr<Transfer> transfer) {
  start();
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(transfer));
  changed_.notify_all();
}

void WaitingLine::run() {
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
