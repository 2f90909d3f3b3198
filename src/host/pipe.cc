// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves tensors through slots with two counters: slots filled and slots emptied.
#include "host/pipe.h"

#include <algorithm>
#include <cstring>

#include "host/counter.h"
#include "host/transfer.h"

namespace deeptide::host {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr int64_t kPipeSlotBytes = 32 << 10;
constexpr uint32_t kPipeSlots = 4;

struct Counters {
  alignas(128) Counter filled;   // written by the sender
  alignas(128) Counter emptied;  // written by the receiver
};

constexpr int64_t kPipeBytes = static_cast<int64_t>(sizeof(Counters)) + kPipeSlots * kPipeSlotBytes;

}  // namespace

struct Pipes::Pipe {
  Counters& counters() const { return *reinterpret_cast<Counters*>(memory); }
  char* slot(uint32_t number) const {
    return memory + sizeof(Counters) + static_cast<int64_t>(number % kPipeSlots) * kPipeSlotBytes;
  }

  std::shared_ptr<Host> host;
  char* memory;
};

/// One tensor on its way through a pipe, seen from one end.
class Pipes::Transit : public Operation {
 public:
  Transit(std::shared_ptr<Pipe> pipe, Tensor tensor, bool sends, OperationPtr before)
      : pipe_(std::move(pipe)), tensor_(std::move(tensor)), sends_(sends), before_(std::move(before)) {
    data_ = sends_ ? const_cast<char*>(readable(tensor_)) : static_cast<char*>(tensor_.mutable_data_ptr());
    bytes_ = static_cast<int64_t>(tensor_.nbytes());
  }

  bool ready() override { return advance(milliseconds(0)); }

  bool advance(milliseconds limit) override {
    const auto deadline = steady_clock::now() + limit;
    if (before_) {
      if (!before_->advance(limit)) return false;
      before_.reset();
    }
    while (done_ < bytes_) {
      if (!wait_for_slot(limit, deadline)) return false;
      move_slot();
    }
    tensor_.reset();
    return true;
  }

 private:
  /// The sender waits until a slot is free, the receiver until one is filled.
  bool wait_for_slot(milliseconds limit, steady_clock::time_point deadline) {
    Counters& counters = pipe_->counters();
    const uint32_t own = (sends_ ? counters.filled : counters.emptied).value.load(std::memory_order_relaxed);
    Counter& other = sends_ ? counters.emptied : counters.filled;
    const uint32_t target = sends_ ? own + 1 - kPipeSlots : own + 1;
    const Linger linger = limit.count() == 0             ? Linger::none
                          : pipe_->host->has_core_each() ? Linger::spin
                                                         : Linger::yield;
    if (await(other, target, deadline, linger)) return true;
    if (limit.count() == 0) return false;
    const auto dead = pipe_->host->find_dead();
    // A rank that has ended may have completed its part first.
    if (dead && !await(other, target, deadline, Linger::none))
      throw TransportError(pipe_->host->find_killed().value_or(*dead));
    return dead.has_value();
  }

  void move_slot() {
    Counters& counters = pipe_->counters();
    Counter& own = sends_ ? counters.filled : counters.emptied;
    const uint32_t number = own.value.load(std::memory_order_relaxed);
    const int64_t count = std::min(kPipeSlotBytes, bytes_ - done_);
    if (sends_) {
      std::memcpy(pipe_->slot(number), data_ + done_, static_cast<size_t>(count));
    } else {
      std::memcpy(data_ + done_, pipe_->slot(number), static_cast<size_t>(count));
    }
    publish(own, number + 1);
    done_ += count;
  }

  std::shared_ptr<Pipe> pipe_;
  Tensor tensor_;
  bool sends_;
  OperationPtr before_;
  char* data_;
  int64_t bytes_;
  int64_t done_ = 0;
};

Pipes::Pipes(std::shared_ptr<Host> host) : host_(std::move(host)), out_(host_->size()), in_(host_->size()) {
  for (int from = 0; from < host_->size(); ++from) {
    for (int to = 0; to < host_->size(); ++to) {
      if (from == to) continue;
      char* memory = host_->reserve(kPipeBytes);
      if (from == host_->index()) out_[to].pipe = std::make_shared<Pipe>(Pipe{host_, memory});
      if (to == host_->index()) in_[from].pipe = std::make_shared<Pipe>(Pipe{host_, memory});
    }
  }
}

Pipes::~Pipes() = default;

OperationPtr Pipes::send(Tensor tensor, int to) { return start(out_.at(to), std::move(tensor), /*sends=*/true); }

OperationPtr Pipes::receive(Tensor tensor, int from) { return start(in_.at(from), std::move(tensor), /*sends=*/false); }

OperationPtr Pipes::start(End& end, Tensor tensor, bool sends) {
  TORCH_CHECK(end.pipe != nullptr, "deeptide: a rank cannot send to itself or receive from itself");
  if (!end.last) host_->take_pages(end.pipe->memory, kPipeBytes);
  auto before = end.last && !end.last->advance(milliseconds(0)) ? end.last : nullptr;
  end.last = std::make_shared<Transit>(end.pipe, std::move(tensor), sends, std::move(before));
  end.last->advance(milliseconds(0));
  return end.last;
}

}  // namespace deeptide::host
