// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts the calls of the transport over c10d to its backend when threads of one process use several.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/transport/transport.h"
#include "device/torch_versions.h"

namespace deeptide::comm {
namespace {

using at::Tensor;
using Work = c10::intrusive_ptr<c10d::Work>;

// The longest stay: if nothing stops the other thread, the test ends once it is there.
constexpr std::chrono::milliseconds kStay =
    device::kGlooStartsAtOnce ? std::chrono::seconds(60) : std::chrono::milliseconds(200);

/// Counts the threads that are in it at once. Each stays until another comes, or for kStay.
class Room {
 public:
  void visit() {
    std::unique_lock lock(mutex_);
    ++num_visitors_;
    most_ = std::max(most_, num_visitors_);
    changed_.notify_all();
    changed_.wait_for(lock, kStay, [this] { return most_ > 1; });
    --num_visitors_;
  }
  int most() const { return most_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_visitors_ = 0;
  int most_ = 0;
};

class StayingBackend : public c10d::Backend {
 public:
  explicit StayingBackend(Room& room) : Backend(0, 1), room_(room) {}
  const std::string getBackendName() const override { return "staying"; }
  Work broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override { return start(); }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start();
  }

 private:
  Work start() {
    room_.visit();
    return c10::make_intrusive<c10d::Work>();
  }

  Room& room_;
};

TEST(C10dTransport, StartsOneCollectiveAtATimeWhereTorchNeedsIt) {
  Room room;
  const auto make = [&] {
    return make_c10d_transport({.backend = c10::make_intrusive<StayingBackend>(room), .ranks = {0}});
  };
  std::thread other([&] { make()->broadcast(at::ones({4}), 0); });
  make()->reduce_scatter(at::ones({4}), at::ones({4}));
  other.join();
  EXPECT_EQ(room.most(), device::kGlooStartsAtOnce ? 2 : 1);
}

}  // namespace
}  // namespace deeptide::comm
