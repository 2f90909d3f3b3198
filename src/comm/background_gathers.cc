// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A queue of gathers and the thread that works on it.
#include "comm/background_gathers.h"

#include <string>

#include "base/resources.h"
#include "comm/transport/awaited_operation.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kTurn{20};  // after which the thread looks for what was added, and for its end

}  // namespace

class BackgroundGathers::Gather : public AwaitedOperation {
 public:
  Gather(Tensor output, Tensor input) : output_(std::move(output)), input_(std::move(input)) {}

  int64_t nbytes() const { return static_cast<int64_t>(output_.nbytes()); }
  Pending start(Group& group) const { return group.all_gather(output_, input_); }
  void end(const std::string& failure) {
    end_with(failure, [this] { output_ = input_ = Tensor(); });
  }

 private:
  Tensor output_, input_;
};

BackgroundGathers::BackgroundGathers(Group& group, int64_t most_bytes)
    : group_(group),
      most_bytes_(most_bytes),
      thread_(start_needed_thread("gathers beside training", [this] { run(); })) {}

BackgroundGathers::~BackgroundGathers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

OperationPtr BackgroundGathers::add(Tensor output, Tensor input) {
  auto gather = std::make_shared<Gather>(std::move(output), std::move(input));
  const std::lock_guard lock(mutex_);
  added_.push_back(gather);
  changed_.notify_all();
  return gather;
}

void BackgroundGathers::run() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !added_.empty() || !under_way_.empty(); });
      if (stop_) return;
    }
    start_due();
    if (!under_way_.empty()) end_first();
  }
}

void BackgroundGathers::start_due() {
  while (under_way_.empty() || bytes_ < most_bytes_) {
    std::shared_ptr<Gather> next;
    {
      const std::lock_guard lock(mutex_);
      if (added_.empty()) return;
      next = std::move(added_.front());
      added_.pop_front();
    }
    if (!failure_.empty()) {
      next->end(failure_);
      continue;
    }
    try {
      Pending pending = next->start(group_);
      bytes_ += next->nbytes();
      under_way_.push_back({std::move(next), std::move(pending)});
    } catch (const std::exception& error) {  // no memory
      failure_ = error.what();
      next->end(failure_);
    }
  }
}

/// Works on the first for a turn.
void BackgroundGathers::end_first() {
  UnderWay& first = under_way_.front();
  try {
    if (failure_.empty() && !first.pending.advance(kTurn)) return;
  } catch (const std::exception& error) {
    failure_ = error.what();
  }
  bytes_ -= first.gather->nbytes();
  first.gather->end(failure_);
  under_way_.pop_front();
}

}  // namespace deeptide::comm
