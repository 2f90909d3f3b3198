// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums a host's contributions before they travel: fewer bytes cross, and the bits stay.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "gradients/route/route.h"
#include "gradients/training.h"
#include "on_hosts.h"

namespace deeptide::gradients {
namespace {

using at::Tensor;

TEST(SummedTogether, IsTheLargestPowerOfTwoThatSavesBytes) {
  EXPECT_EQ(summed_together(1, at::kFloat), 1);
  EXPECT_EQ(summed_together(2, at::kFloat), 2);
  EXPECT_EQ(summed_together(3, at::kFloat), 1);
  EXPECT_EQ(summed_together(6, at::kFloat), 2);
  EXPECT_EQ(summed_together(8, at::kFloat), 8);
  EXPECT_EQ(summed_together(2, at::kBFloat16), 1) << "one sum in fp32 has the bytes of two rows";
  EXPECT_EQ(summed_together(4, at::kBFloat16), 4);
  EXPECT_EQ(summed_together(12, at::kHalf), 4);
}

/// Sums of a few steps, and what this rank has sent over the network.
struct Outcome {
  std::vector<Tensor> sums;  // (shard,) by step and unit
  int64_t crossed = 0;
};

Outcome train(const World& w, const ReducerOptions& options, bool uneven) {
  Outcome outcome;
  Training training(w, options);
  std::mt19937 random(static_cast<unsigned>(w.rank));
  for (int step = 0; step < 3; ++step) {
    training.backwards([&](int u, int p, int64_t n) {
      if (uneven && random() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      training.reducer->add(u, p, gradient_of(w.rank, u, p, n, step));
    });
    training.finish();
    for (size_t u = 0; u < kSizes.size(); ++u) {
      outcome.sums.push_back(training.reducer->gradient(static_cast<int>(u)).sum().clone());
    }
    training.reducer->clear_accumulated();
  }
  training.expect_memory_as_predicted();
  outcome.crossed = training.links->sent_bytes();
  return outcome;
}

/// By rank.
std::vector<Outcome> outcomes(const ReducerOptions& options, bool uneven) {
  std::vector<Outcome> all(8);
  run_on_hosts({0, 0, 0, 0, 1, 1, 1, 1}, [&](const World& w) { all[w.rank] = train(w, options, uneven); });
  return all;
}

TEST(TwoLevelRoute, AreTheBitsOfOneLevelAndCrossOncePerHost) {
  for (const bool side_thread : {false, true}) {
    for (const bool keep_rows : {false, true}) {
      ReducerOptions options{.side_thread = side_thread, .keep_rows = keep_rows, .scale = 0.125};
      const auto flat = outcomes(options, /*uneven=*/false);
      options.together = 4;
      const auto by_host = outcomes(options, /*uneven=*/true);
      for (size_t rank = 0; rank < flat.size(); ++rank) {
        ASSERT_EQ(flat[rank].sums.size(), by_host[rank].sums.size());
        for (size_t i = 0; i < flat[rank].sums.size(); ++i) {
          EXPECT_TRUE(at::equal(flat[rank].sums[i], by_host[rank].sums[i])) << "rank " << rank << ", sum " << i;
        }
        // Flat, a rank sends seven of the eight rows of its bucket; by host, half of a quarter of its elements.
        EXPECT_EQ(by_host[rank].crossed * 7, flat[rank].crossed);
      }
    }
  }
}

TEST(TwoLevelRoute, WaitForALateNeighbourWithoutStoppingTheOthers) {
  run_on_hosts({0, 0, 1, 1}, [&](const World& w) {
    ReducerOptions options;
    options.together = 2;
    Training training(w, options);
    for (int step = 0; step < 2; ++step) {
      if (w.rank == step) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, w.rank + 1.0f)); });
      training.finish();
      training.backwards([&](int u, int p, int64_t n) { training.expect_sum(u, p, at::full({n}, 10.0f)); });
      training.reducer->clear_accumulated();
    }
  });
}

TEST(TwoLevelRoute, ReportALostNeighbour) {
  Meeting meeting(4);
  run_on_hosts({0, 0, 1, 1}, [&](const World& w) {
    ReducerOptions options;
    options.together = 2;
    Training training(w, options, /*timeout_ms=*/500);
    if (w.rank != 1) {  // whose part never comes
      training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, 1.0f)); });
      EXPECT_THROW(training.reducer->finish(1), CommError);
    }
    meeting.arrive();  // all wait before one goes
  });
}

}  // namespace
}  // namespace deeptide::gradients
