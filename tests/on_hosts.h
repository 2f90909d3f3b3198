// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, spread over hosts that are only names; and a rendezvous of threads that uses none of our code.
#pragma once

#include <atomic>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "host/host.h"
#include "ranks.h"
#include "world/failure_board.h"

namespace deeptide {

inline constexpr std::chrono::milliseconds kLong{60'000};

inline std::shared_ptr<world::FailureBoard> board_of(const World& world, const std::optional<world::Mesh>& mesh = {}) {
  return std::make_shared<world::FailureBoard>(world, "board", world::kErrorGrace, mesh);
}

/// A clock that does not advance.
inline std::shared_ptr<const comm::Clock> clock_at(int64_t step) {
  auto clock = std::make_shared<comm::Clock>();
  clock->set_step(step);
  return clock;
}

/// Runs rank_main on one rank for each entry of `hosts`, which names the host of each.
inline void run_on_hosts(const std::vector<int>& hosts, const RankMain& rank_main) {
  run_ranks(static_cast<int>(hosts.size()), [&](World world) {
    world.host = "host " + std::to_string(hosts[world.rank]);
    rank_main(world);
  });
}

/// A barrier of threads, for tests that must not depend on what they test.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}
  void arrive() {
    const int turn = turn_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++turn_;
    }
    while (turn_ == turn) std::this_thread::yield();
  }
  /// Arrives once `run` has ended, and only then throws the CommError that it threw: until all ranks are here, nobody
  /// unwinds what the others watch.
  template <typename Run>
  void arrive_after(Run run) {
    std::exception_ptr failure;
    try {
      run();
    } catch (const CommError&) {
      failure = std::current_exception();
    }
    arrive();
    if (failure) std::rethrow_exception(failure);
  }

 private:
  int size_;
  std::atomic<int> arrived_{0};
  std::atomic<int> turn_{0};
};

}  // namespace deeptide
