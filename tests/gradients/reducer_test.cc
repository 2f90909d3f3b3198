// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums over ranks are the fp32 sums by pairs, bit for bit, whenever and wherever gradients arrive.
#include "gradients/reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <random>
#include <thread>
#include <tuple>

#include "gradients/training.h"
#include "on_hosts.h"
#include "ranks.h"

namespace deeptide::gradients {
namespace {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

/// Small integers: their sums are exact in any order and any type.
float whole_number(int rank, int u, int p, int pass) {
  return static_cast<float>((rank + 2 * u + 3 * p + 5 * pass) % 7 - 3);
}

/// Ranks, and how many of them a host has; 0: no two ranks share memory.
struct Spread {
  int ranks;
  int per_host;
};

using Setting = std::tuple<Spread, at::ScalarType, bool, bool>;  // wire type, overlap, keep rows

class Sums : public testing::TestWithParam<Setting> {
 protected:
  int world() const { return std::get<0>(GetParam()).ranks; }
  int per_host() const { return std::get<0>(GetParam()).per_host; }
  ReducerOptions options(double scale = 1.0) const {
    return {.reduce_dtype = std::get<1>(GetParam()),
            .ordered = true,
            .together = per_host() == 0 ? 1 : summed_together(per_host(), std::get<1>(GetParam())),
            .overlap = std::get<2>(GetParam()),
            .keep_rows = std::get<3>(GetParam()),
            .scale = scale};
  }
  void run(const RankMain& rank_main) const {
    std::vector<int> hosts;
    for (int rank = 0; rank < world(); ++rank) hosts.push_back(per_host() == 0 ? rank : rank / per_host());
    run_on_hosts(hosts, rank_main);
  }
};

TEST_P(Sums, AreTakenByPairsInFp32AndScaledOnce) {
  const double scale = 1.0 / (3 * world());
  run([&](const World& w) {
    Training training(w, options(scale));
    training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, gradient_of(w.rank, u, p, n)); });
    EXPECT_TRUE(training.reducer->has_pending());
    training.finish();
    training.backwards([&](int u, int p, int64_t n) {
      std::vector<Tensor> rows;
      for (int r = 0; r < w.size; ++r) rows.push_back(gradient_of(r, u, p, n).to(options().reduce_dtype));
      training.expect_sum(u, p, sum_by_pairs(std::move(rows)).mul_(static_cast<float>(scale)));
    });
    double squares = 0.0;  // padding holds zeros, or it would show here
    for (size_t u = 0; u < kSizes.size(); ++u) {
      squares += training.reducer->gradient(static_cast<int>(u)).sum().to(at::kDouble).square().sum().item<double>();
    }
    EXPECT_NEAR(training.reducer->sum_of_squares(), squares, 1e-12 * squares);
    EXPECT_FALSE(training.reducer->has_pending());
    EXPECT_TRUE(training.reducer->has_gradient());
    EXPECT_FALSE(training.reducer->bad());
  });
}

TEST_P(Sums, TakeAMissingGradientForZeros) {
  run([&](const World& w) {
    Training training(w, options());
    const auto missing = [](int rank, int u, int p) { return (rank + u + p) % 3 == 0; };
    for (int step = 0; step < 3; ++step) {
      training.backwards([&](int u, int p, int64_t n) {
        if (!missing(w.rank, u, p)) training.reducer->add(u, p, at::full({n}, whole_number(w.rank, u, p, step)));
      });
      training.finish();
      training.backwards([&](int u, int p, int64_t n) {
        float sum = 0;
        for (int r = 0; r < w.size; ++r) sum += missing(r, u, p) ? 0 : whole_number(r, u, p, step);
        training.expect_sum(u, p, at::full({n}, sum));
      });
      training.reducer->clear_accumulated();
      EXPECT_FALSE(training.reducer->has_gradient());
    }
  });
}

/// No rank begins more than kMaxRoundsAhead rounds before all: an engine would serve the others while it waits.
TEST_P(Sums, AddUpHoweverOftenAndInWhateverOrderEachRankGoesBackward) {
  run([&](const World& w) {
    Training training(w, options());
    for (int step = 0; step < 4; ++step) {
      std::vector<std::vector<float>> expected(kSizes.size(), std::vector<float>(3, 0.0f));
      for (int micro = 0; micro < 2; ++micro) {
        for (int r = 0; r < w.size; ++r) {  // every rank replays every rank's choices
          std::mt19937 random(1000 * step + 100 * micro + r);
          const int passes = static_cast<int>(random() % (kMaxRoundsAhead + 1));
          for (int pass = 0; pass < passes; ++pass) {
            const bool all = random() % 2;
            std::vector<std::pair<int, int>> places;
            training.backwards([&](int u, int p, int64_t) { places.emplace_back(u, p); });
            if (random() % 3 == 0) std::shuffle(places.begin(), places.end(), random);
            for (const auto& [u, p] : places) {
              if (!all && random() % 2) continue;
              const float value = whole_number(r, u, p, pass);
              expected[u][p] += value;
              if (r == w.rank) training.reducer->add(u, p, at::full({kSizes[u][p]}, value));
            }
          }
        }
        training.finish();
      }
      if (training.reducer->has_gradient()) {
        training.backwards([&](int u, int p, int64_t n) { training.expect_sum(u, p, at::full({n}, expected[u][p])); });
      }
      training.reducer->clear_accumulated();
    }
  });
}

TEST_P(Sums, StayHereInFp32UntilTheBoundary) {
  run([&](const World& w) {
    Training training(w, options());
    training.reducer->set_local(true);
    for (int pass = 0; pass < 3; ++pass) {
      if (pass == 2) training.reducer->set_local(false);
      training.backwards(
          [&](int u, int p, int64_t n) { training.reducer->add(u, p, gradient_of(w.rank, u, p, n, pass)); });
      if (pass < 2) {
        EXPECT_EQ(training.reducer->rounds_wanted(), 0);
      }
      training.finish();
      EXPECT_EQ(training.reducer->has_gradient(), pass == 2);
    }
    training.backwards([&](int u, int p, int64_t n) {
      std::vector<Tensor> sent;
      for (int r = 0; r < w.size; ++r) {
        Tensor own = gradient_of(r, u, p, n, 0);
        for (int pass = 1; pass < 3; ++pass) own = own + gradient_of(r, u, p, n, pass);
        sent.push_back(own.to(options().reduce_dtype));
      }
      training.expect_sum(u, p, sum_by_pairs(std::move(sent)));
    });
  });
}

TEST_P(Sums, KeepWhatAccumulatesHereWhateverOthersHaveBegun) {
  run([&](const World& w) {
    Training training(w, options());
    training.reducer->set_local(true);
    training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::ones({n})); });
    training.reducer->keep_up(1);
    EXPECT_EQ(training.reducer->rounds_begun(), 0);
    training.finish();
    EXPECT_FALSE(training.reducer->has_gradient());
  });
}

TEST_P(Sums, CompleteARoundThatBeganBeforeTheBoundaryMovedAway) {
  run([&](const World& w) {
    Training training(w, options(), 5000);
    const auto goes = [](int rank, int u) { return rank == 0 || u == 3; };  // the others skip all but the last unit
    const auto go_backward = [&](float value) {
      training.backwards([&](int u, int p, int64_t n) {
        if (goes(w.rank, u)) training.reducer->add(u, p, at::full({n}, value));
      });
    };
    go_backward(1);
    training.reducer->set_local(true);
    go_backward(2);
    training.finish();
    training.reducer->set_local(false);
    go_backward(4);
    training.finish();
    training.backwards([&](int u, int p, int64_t n) {
      const int ranks = goes(w.size - 1, u) ? w.size : 1;
      training.expect_sum(u, p, at::full({n}, 7.0f * static_cast<float>(ranks)));
    });
  });
}

TEST_P(Sums, ForgetWhatIsDiscarded) {
  run([&](const World& w) {
    Training training(w, options());
    const auto go_backward = [&](float value) {
      training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, value)); });
    };
    go_backward(100);
    training.reducer->discard(training.reducer->rounds_begun());
    EXPECT_FALSE(training.reducer->has_pending());
    EXPECT_FALSE(training.reducer->has_gradient());
    EXPECT_EQ(training.reducer->rounds_wanted(), 0);
    go_backward(2);
    training.finish();
    training.backwards([&](int u, int p, int64_t n) { training.expect_sum(u, p, at::full({n}, 2.0f * w.size)); });
  });
}

/// One rank's gradient is not a number, in one element.
void expect_culprit_named(const World& w, const ReducerOptions& options) {
  Training training(w, options);
  const int culprit = w.size - 1;
  training.backwards([&](int u, int p, int64_t n) {
    Tensor gradient = at::full({n}, 1.0f);
    if (w.rank == culprit && u == 2 && p == 1) gradient[2].fill_(std::numeric_limits<float>::quiet_NaN());
    training.reducer->add(u, p, gradient);
  });
  training.finish();
  const Unit& unit = *training.units[2];
  const auto [first, last] = unit.owned_range(unit.parameters()[1]);
  const int64_t at = unit.parameters()[1].offset + 2;
  const bool mine = first <= at && at < last;
  // If a host's ranks are summed first, one of the culprit's host has seen its contribution: that of the same index.
  const int per_host = training.host ? training.host->size() : 1;
  const auto owner = static_cast<int>(at / unit.layout().shard);
  const bool seen = training.host ? w.rank == culprit / per_host * per_host + owner % per_host : mine;
  EXPECT_EQ(std::isfinite(training.reducer->sum_of_squares()), !mine);
  EXPECT_EQ(training.reducer->bad().has_value(), mine || seen);
  if (mine || seen) {
    EXPECT_EQ(training.reducer->bad()->unit, 2);
    EXPECT_EQ(training.reducer->bad()->parameter, 1);
    EXPECT_EQ(number(training.reducer->bad()->rank), seen ? culprit : -1);
  }
  training.reducer->clear_accumulated();
  EXPECT_FALSE(training.reducer->bad());
  training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, 1.0f)); });
  training.finish();
  EXPECT_TRUE(std::isfinite(training.reducer->sum_of_squares())) << "the next step is a clean one";
}

TEST_P(Sums, NameTheParameterAndTheRankOfANonFiniteGradient) {
  run([&](const World& w) { expect_culprit_named(w, options()); });
}

// Looks once per step, as on a device, where reading each sum would make the host wait.
TEST_P(Sums, NameThemTooWhenTheyLookOncePerStep) {
  if (options().together > 1) GTEST_SKIP() << "on a device, each rank's contribution travels";
  auto late = options();
  late.finite_check = FiniteCheckTime::each_step;
  run([&](const World& w) { expect_culprit_named(w, late); });
}

TEST(SideThread, SumsWhileBackwardGoesOn) {
  for (bool keep_rows : {false, true}) {
    run_ranks(3, [&](const World& w) {
      Training training(w, {.reduce_dtype = at::kBFloat16, .side_thread = true, .keep_rows = keep_rows});
      for (int step = 0; step < 4; ++step) {
        const int passes = 1 + step % 2;  // the second pass of a step adds to the first
        for (int pass = 0; pass < passes; ++pass) {
          training.backwards([&](int u, int p, int64_t n) {
            training.reducer->add(u, p, at::full({n}, whole_number(w.rank, u, p, step + pass)));
          });
          training.finish();
        }
        training.backwards([&](int u, int p, int64_t n) {
          float sum = 0.0f;
          for (int pass = 0; pass < passes; ++pass) {
            for (int r = 0; r < w.size; ++r) sum += whole_number(r, u, p, step + pass);
          }
          training.expect_sum(u, p, at::full({n}, sum));
        });
        training.reducer->clear_accumulated();
      }
    });
  }
}

size_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(SideThread, LeavesItsExceptionToTheThreadThatNeedsTheSum) {
  run_ranks(1, [](const World& w) {
    const size_t before = num_threads();
    Training training(w, {.reduce_dtype = at::kDouble, .side_thread = true});  // the sum does not know doubles
    ASSERT_EQ(num_threads(), before + 1);
    training.reducer->add(3, 0, at::full({64}, 1.0f));
    while (num_threads() > before) std::this_thread::yield();  // it has met the sum
    for (int time = 0; time < 2; ++time) {
      try {
        training.reducer->finish(1);
        FAIL() << "expected an error";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("Double"), std::string::npos) << error.what();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, Sums,
                         testing::Combine(testing::Values(Spread{1, 0}, Spread{2, 0}, Spread{4, 0}, Spread{4, 2},
                                                          Spread{12, 6}),
                                          testing::Values(at::kFloat, at::kBFloat16), testing::Bool(), testing::Bool()),
                         [](const auto& info) {
                           return "World" + std::to_string(std::get<0>(info.param).ranks) +
                                  (std::get<0>(info.param).per_host == 0
                                       ? ""
                                       : "HostsOf" + std::to_string(std::get<0>(info.param).per_host)) +
                                  c10::toString(std::get<1>(info.param)) + (std::get<2>(info.param) ? "Overlap" : "") +
                                  (std::get<3>(info.param) ? "Rows" : "");
                         });

TEST(Reducer, BlamesNobodyWhenOnlyTheSumOverflows) {
  run_ranks(2, [](const World& w) {
    Training training(w);
    training.reducer->add(1, 0, at::full({1}, 3e38f));
    training.finish();
    const auto& bad = training.reducer->bad();
    ASSERT_EQ(bad.has_value(), w.rank == 0) << "the one element lies in rank 0's shard";
    if (bad) {
      EXPECT_EQ(bad->unit, 1);
      EXPECT_EQ(bad->parameter, 0);
      EXPECT_EQ(bad->rank, world::WorldRank::none);
    }
  });
}

TEST(Reducer, LeavesTheSumToTheTransportWhenAsked) {
  run_ranks(3, [](const World& w) {
    Training training(w, {.ordered = false});
    training.backwards(
        [&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, whole_number(w.rank, u, p, 0))); });
    training.finish();
    training.backwards([&](int u, int p, int64_t n) {
      float sum = 0;
      for (int r = 0; r < 3; ++r) sum += whole_number(r, u, p, 0);
      training.expect_sum(u, p, at::full({n}, sum));
    });
  });
}

TEST(Reducer, SumsSparseGradientsLikeDenseOnes) {
  run_ranks(2, [](const World& w) {
    Training training(w, {.scale = 1.0});
    training.backwards([&](int u, int p, int64_t n) {
      const Tensor whole = at::full({n}, whole_number(w.rank, u, p, 0));
      training.reducer->add(u, p, p % 2 == 0 ? whole : whole.to_sparse());
    });
    training.finish();
    training.backwards([&](int u, int p, int64_t n) {
      training.expect_sum(u, p, at::full({n}, whole_number(0, u, p, 0) + whole_number(1, u, p, 0)));
    });
  });
}

TEST(Reducer, RefusesOtherLayoutsByName) {
  run_ranks(1, [](const World& w) {
    Training training(w);
    try {
      training.reducer->add(2, 1, at::full({3}, 1.0f).reshape({1, 3}).to_sparse_csr());
      FAIL() << "took a compressed sparse gradient";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("'u2.p1' received a gradient of layout SparseCsr"), std::string::npos)
          << error.what();
    }
    EXPECT_FALSE(training.reducer->has_pending());
  });
}

TEST(Reducer, DoesNotBlockBackwardOnAPeerThatIsElsewhere) {
  run_ranks(2, [](const World& w) {
    Training training(w);
    if (w.rank == 0) {  // several rounds of it while rank 1 has nothing to reduce yet
      const auto begin = std::chrono::steady_clock::now();
      for (int pass = 0; pass < 2; ++pass) {
        training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, 1.0f)); });
      }
      // Half a second for the peer to arrive; one wait per unit would take three seconds.
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(2500));
      EXPECT_GT(training.ledger->peak(device::Role::late_communication), 0);
    }
    training.finish();
    training.backwards([&](int u, int p, int64_t n) { training.expect_sum(u, p, at::full({n}, 2.0f)); });
    training.expect_memory_as_predicted();
  });
}

TEST(Reducer, WaitsForALatePeerWithinTheMemoryThatItPredicts) {
  constexpr int kPasses = 12;
  for (const bool keep_rows : {false, true}) {
    run_ranks(2, [&](const World& w) {
      Training training(w, {.reduce_dtype = at::kBFloat16, .keep_rows = keep_rows}, 60'000, /*serves=*/true);
      const auto go_backward = [&] {
        training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, 1.0f)); });
      };
      const int passes = w.rank == 0 ? kPasses : 1;  // rank 1 has no more gradients, and keeps up
      for (int pass = 0; pass < passes; ++pass) go_backward();
      const int64_t most = training.close();
      EXPECT_TRUE(w.rank == 0 || most > 1) << most << " announced by the rank that waits";
      training.finish();
      training.backwards([&](int u, int p, int64_t n) { training.expect_sum(u, p, at::full({n}, kPasses + 1.0f)); });
      training.expect_memory_as_predicted();
    });
  }
}

TEST(Reducer, SaysWhichUnitItCouldNotReduce) {
  const auto errors = errors_of_ranks(2, [](const World& w) {
    Training training(w, {}, 1500);
    if (w.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3500));
      return;
    }
    training.clock->set_step(4);
    training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, 1.0f)); });
    training.reducer->finish(1);
  });
  EXPECT_NE(errors[0].find("step 4, backward, reducing gradients of unit 'u3'"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("no report from rank 1"), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace deeptide::gradients
