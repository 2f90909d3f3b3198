// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks that take different paths through the same units: every rank is served, none hangs, the budget holds.
#include "sharding/residency.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "comm/mailbox.h"
#include "ranks.h"
#include "sharding/sharded_tensors.h"
#include "tiers/copying_store.h"
#include "world/failure_board.h"
#include "world/mesh.h"

namespace deeptide::sharding {
namespace {

using at::Tensor;

constexpr int kNumParameters = 9;

/// Constant tensors of odd sizes, one element and many: value i + 1.
std::vector<Tensor> constants() {
  constexpr int64_t kSizes[kNumParameters] = {1, 700, 333, 64, 1000, 2, 513, 900, 90};
  std::vector<Tensor> tensors;
  for (int i = 0; i < kNumParameters; ++i) tensors.push_back(at::full({kSizes[i]}, static_cast<float>(i + 1)));
  return tensors;
}

bool is_constant(const Tensor& t, float value) {
  return t.min().item<float>() == value && t.max().item<float>() == value;
}

struct Way {
  int world;
  ResidencyLimits limits;
  int64_t max_unit;
  ShardPlacement place = {};
};

constexpr auto kPatience = std::chrono::seconds(60);

/// A shard that needs leases, block by block.
tiers::Buffer elsewhere(const UnitLayout& layout) {
  const Tensor zeros = at::zeros({layout.shard}, layout.dtype);
  return {std::make_shared<tiers::CopyingStore>(zeros), layout.shard, layout.dtype, /*block_numel=*/50};
}

class DivergentRanks : public testing::TestWithParam<Way> {};

TEST_P(DivergentRanks, FindTheirParametersWithinTheBudget) {
  const Way way = GetParam();
  run_ranks(way.world, [&](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, way.limits, way.max_unit, kPatience, way.place);
    std::mt19937 random(world.rank);
    for (int pass = 0; pass < 6; ++pass) {
      const int accesses = static_cast<int>(random() % 40);  // none at all, too
      for (int k = 0; k < accesses; ++k) {
        const int i = random() % 3 ? k % kNumParameters : random() % kNumParameters;
        c10::AutoGradMode mode(random() % 4 != 0);
        const float sum = tensors[i].sum().item<float>();
        ASSERT_EQ(sum, static_cast<float>((i + 1) * tensors[i].numel())) << "parameter " << i << ", pass " << pass;
      }
      model.close();
      if (pass % 2) model.residency->release_all();
    }
    EXPECT_LE(model.residency->peak_bytes(), model.residency->budget() * 4);
    EXPECT_FALSE(model.any_pinned());
    model.residency->release_all();
    EXPECT_EQ(model.residency->live_bytes(), 0);
  });
}

TEST_P(DivergentRanks, AreServedWhenOneOperatorUsesManyUnits) {
  const Way way = GetParam();
  run_ranks(way.world, [&](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, way.limits, way.max_unit, kPatience, way.place);
    std::mt19937 random(100 + world.rank);
    for (int pass = 0; pass < 4; ++pass) {
      for (int k = static_cast<int>(random() % 12); k > 0; --k) {
        const int i = random() % kNumParameters, j = random() % kNumParameters;
        const Tensor product = tensors[i].unsqueeze(1) * tensors[j].unsqueeze(0);
        ASSERT_TRUE(is_constant(product, static_cast<float>((i + 1) * (j + 1)))) << i << " x " << j;
      }
      model.close();
    }
    model.residency->release_all();
    EXPECT_EQ(model.residency->live_bytes(), 0);
  });
}

TEST_P(DivergentRanks, AgreeOnWhatTheyWroteAlike) {
  const Way way = GetParam();
  run_ranks(way.world, [&](const World& world) {
    at::NoGradGuard no_grad;
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, way.limits, way.max_unit, kPatience, way.place);
    std::vector<float> expected;
    for (int i = 0; i < kNumParameters; ++i) expected.push_back(static_cast<float>(i + 1));
    std::mt19937 same(5), own(world.rank);
    for (int pass = 0; pass < 5; ++pass) {
      for (int k = 0; k < 6; ++k) {
        const int i = same() % kNumParameters;
        tensors[i].mul_(2);
        expected[i] *= 2;
      }
      model.close();
      model.residency->release_all();
      for (int k = static_cast<int>(own() % 20); k > 0; --k) {
        const int i = own() % kNumParameters;
        ASSERT_TRUE(is_constant(tensors[i].clone(), expected[i])) << "parameter " << i << ", pass " << pass;
      }
      model.close();
    }
  });
}

TEST_P(DivergentRanks, EachSeeTheWritesInTheirOwnOrder) {
  const Way way = GetParam();
  run_ranks(way.world, [&](const World& world) {
    at::NoGradGuard no_grad;
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, way.limits, way.max_unit, kPatience, way.place);
    std::vector<float> expected;
    for (int i = 0; i < kNumParameters; ++i) expected.push_back(static_cast<float>(i + 1));
    std::mt19937 same(7), own(200 + world.rank);
    for (int k = 0; k < 60; ++k) {
      const int i = same() % kNumParameters;
      const bool doubles = expected[i] < 100;
      tensors[i].mul_(doubles ? 2.0 : 0.125);
      expected[i] *= doubles ? 2.0f : 0.125f;
      for (int reads = static_cast<int>(own() % 8) - 3; reads > 0; --reads) {
        const int j = own() % kNumParameters;
        ASSERT_TRUE(is_constant(tensors[j].clone(), expected[j])) << "parameter " << j << " after write " << k;
      }
      if (same() % 15 == 0) model.close();
    }
    model.close();
    model.residency->release_all();
    for (int i = 0; i < kNumParameters; ++i) EXPECT_TRUE(is_constant(tensors[i].clone(), expected[i])) << i;
    model.close();
    model.residency->release_all();
    EXPECT_EQ(model.residency->live_bytes(), 0);
  });
}

TEST_P(DivergentRanks, WriteAlikeWithinTheBudget) {
  const Way way = GetParam();
  run_ranks(way.world, [&](const World& world) {
    at::NoGradGuard no_grad;
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, way.limits, way.max_unit, kPatience, way.place);
    for (int pass = 0; pass < 3; ++pass) {
      for (const Tensor& t : tensors) t.add_(1);
      EXPECT_LE(model.residency->peak_bytes(), model.residency->budget() * 4);
    }
    model.close();
    for (int i = 0; i < kNumParameters; ++i) {
      EXPECT_TRUE(is_constant(tensors[i].clone(), static_cast<float>(i + 4)));
    }
    model.close();
  });
}

std::vector<Way> ways() {
  std::vector<Way> all;
  for (int world : {1, 2, 3, 4}) {
    all.push_back({world, {}, 1});  // no prefetch, the smallest budget: two units
    all.push_back({world, {.max_live = 2500, .prefetch = 2000, .max_reuse_distance = 500}, 800});
  }
  all.push_back({3, {.max_live = 1 << 20, .prefetch = 1 << 20, .max_reuse_distance = 1 << 20}, 1});
  for (size_t i = 0, resident = all.size(); i < resident; ++i) {
    all.push_back(all[i]);
    all.back().place = &elsewhere;
    all.back().limits.read_ahead_bytes = 3000;
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ways, DivergentRanks, testing::ValuesIn(ways()), [](const auto& info) {
  const Way& way = info.param;
  return "World" + std::to_string(way.world) + "Live" + std::to_string(way.limits.max_live) + "Unit" +
         std::to_string(way.max_unit) + (way.place ? "Elsewhere" : "");
});

TEST(Residency, ServesARankThatHasAllToItself) {
  run_ranks(3, [](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors);
    if (world.rank == 1) {
      for (int i = 0; i < kNumParameters; ++i) EXPECT_TRUE(is_constant(tensors[i].clone(), static_cast<float>(i + 1)));
    }
    model.close();
    EXPECT_GE(model.residency->gathers_issued(), kNumParameters) << "the others took part";
  });
}

TEST(Residency, HandsEveryoneEveryonesClosingMessage) {
  run_ranks(3, [](const World& world) {
    ShardedTensors model(world, "model", constants());
    const auto closes = model.close({.joined = world.rank == 1, .rounds = 10 + world.rank});
    const comm::Vote own{.failed = world.rank == 2, .digest = 20u + static_cast<uint64_t>(world.rank)};
    const auto votes = model.rounds.exchange(own, {"step", "agreeing"});
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(closes[r].rounds, 10 + r);
      EXPECT_EQ(closes[r].joined, r == 1);
      EXPECT_EQ(votes[r].digest, 20u + static_cast<uint64_t>(r));
      EXPECT_EQ(votes[r].failed, r == 2);
    }
  });
}

/// Two stages of two ranks each. Rank 0 waits for a letter that comes only once rank 1, of its own stage, has gathered
/// units, for which it needs rank 0.
TEST(Residency, ServesItsTeamWhileItsRankWaitsForANeighbour) {
  const world::Mesh mesh(4, {2, 2, 1, 1, 1});  // pipe, data, and the others
  run_ranks(4, [&](const World& world) {
    const auto team = comm::Team::along(mesh, world.rank, {world::Axis::data});
    const comm::Site here{"forward", "waiting for the stage before"};
    comm::Group peers(world, comm::Team::whole(world), "peers",
                      {.timeout = kPatience,
                       .board = std::make_shared<world::FailureBoard>(world, "board"),
                       .peers = comm::PeerTraffic::yes});
    comm::Mailbox mailbox(peers, at::kCPU);
    const auto tensors = constants();
    ShardedTensors model(team.within(world), "stage " + std::to_string(world.rank / 2), tensors);
    const auto serve = [&] { model.residency->attend(); };
    constexpr int kFrom[] = {2, -1, 3, 1}, kTo[] = {-1, 3, 0, 2};  // 1, 3, 2, 0
    if (kFrom[world.rank] >= 0) {
      const Tensor letter = mailbox.wait(mailbox.receive_told(kFrom[world.rank]), here, serve);
      EXPECT_TRUE(is_constant(letter, 42));
    } else {
      for (int i = 0; i < kNumParameters; ++i) EXPECT_TRUE(is_constant(tensors[i].clone(), static_cast<float>(i + 1)));
    }
    if (kTo[world.rank] >= 0) mailbox.send_told(at::full({2, 3}, 42.0f), kTo[world.rank]);
    mailbox.flush(here, serve);
    model.close();
    peers.barrier(here);
  });
}

TEST(Residency, ShowsEveryoneTheSameAfterWritesOfOneRankAlone) {
  run_ranks(3, [](const World& world) {
    at::NoGradGuard no_grad;
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors,
                         {.max_live = 1 << 20, .prefetch = 1 << 20, .max_reuse_distance = 1 << 20});
    for (const Tensor& t : tensors) t.sum();  // whole on every rank
    if (world.rank == 0) tensors[4].fill_(-1);
    EXPECT_TRUE(is_constant(tensors[4].clone(), world.rank == 0 ? -1.0f : 5.0f)) << "each its own";
    model.close();
    const Tensor seen = tensors[4].clone();
    const int64_t own = model.units[4]->layout().shard;  // rank 0's slice is the first
    EXPECT_TRUE(is_constant(seen.narrow(0, 0, own), -1));
    EXPECT_TRUE(is_constant(seen.narrow(0, own, seen.numel() - own), 5));
    model.close();
  });
}

TEST(Residency, PrefetchesWhatThePassBeforeUsed) {
  run_ranks(2, [](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors,
                         {.max_live = 1 << 20, .prefetch = 1 << 20, .max_reuse_distance = 1 << 20});
    std::vector<int64_t> rounds;
    for (int pass = 0; pass < 2; ++pass) {
      const auto before = model.rounds.count();
      for (const Tensor& t : tensors) t.sum();
      rounds.push_back(model.rounds.count() - before);
      model.close();
      model.residency->release_all();
    }
    EXPECT_LE(rounds[1], 2) << "all units fit the prefetch: one round asks for them all";
    EXPECT_EQ(model.residency->gathers_issued(), 2 * kNumParameters) << "none is gathered twice in a pass";
  });
}

/// A step that doubles every parameter.
void double_all(ShardedTensors& model) {
  model.residency->begin_step();
  EXPECT_EQ(model.residency->live_bytes(), 0);
  for (auto& unit : model.units) {
    for_each_block(unit->shard(), {0, unit->shard().numel()},
                   [&](tiers::Block block) { unit->shard().lease(block, tiers::Access::update).tensor().mul_(2); });
    model.residency->note_stepped(*unit);
  }
  model.residency->end_step();
}

TEST_P(DivergentRanks, FindWhatAStepHasChanged) {
  const Way way = GetParam();
  run_ranks(way.world, [&](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, way.limits, way.max_unit, kPatience, way.place);
    std::mt19937 random(300 + world.rank);
    float factor = 1;
    for (int pass = 0; pass < 6; ++pass) {
      // Ranks begin alike, or each with a unit of its own, or do nothing.
      const int first = pass % 3 == 1 ? static_cast<int>(random() % kNumParameters) : 0;
      const int accesses = pass % 3 == 2 ? 0 : static_cast<int>(random() % 30);
      for (int k = 0; k < accesses; ++k) {
        const int i = random() % 4 ? (first + k) % kNumParameters : random() % kNumParameters;
        c10::AutoGradMode mode(random() % 4 != 0);
        ASSERT_EQ(tensors[i].detach().sum().item<float>(), factor * static_cast<float>((i + 1) * tensors[i].numel()))
            << "parameter " << i << ", pass " << pass;
      }
      model.close();
      at::NoGradGuard no_grad;
      double_all(model);
      factor *= 2;
      if (pass % 2) model.close({}, /*ends_pass=*/false);  // as when gradients are dropped
    }
    EXPECT_LE(model.residency->peak_bytes(), model.residency->budget() * 4);
    model.residency->release_all();
    EXPECT_EQ(model.residency->live_bytes(), 0);
  });
}

TEST(Residency, GathersWithinAStepWhatTheNextPassBeginsWith) {
  run_ranks(2, [](const World& world) {
    at::NoGradGuard no_grad;
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors,
                         {.max_live = 2200, .prefetch = 1 << 20, .max_reuse_distance = 1 << 20});
    for (int pass = 1; pass <= 3; ++pass) {
      const int64_t before = model.residency->gathers_issued();
      c10::AutoGradMode mode(true);
      for (int i = 0; i < kNumParameters; ++i) {
        EXPECT_TRUE(is_constant(tensors[i].detach(), static_cast<float>((i + 1) * (1 << (pass - 1)))));
      }
      const int64_t ahead = pass == 1 ? 0 : 5;
      EXPECT_EQ(model.residency->gathers_issued() - before, kNumParameters - ahead) << "none twice, pass " << pass;
      model.close();
      const int64_t closed = model.residency->gathers_issued();
      double_all(model);
      EXPECT_EQ(model.residency->gathers_issued() - closed, 5) << "the five that fit";
    }
  });
}

TEST(Residency, GathersAheadOnlyWhatAllRanksExpect) {
  run_ranks(2, [](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, {.max_live = 1 << 20, .prefetch = 1 << 20});
    // Both ranks use parameter 5; the others are used by one rank alone.
    for (const int i : world.rank == 0 ? std::vector<int>{0, 5, 2} : std::vector<int>{5, 7}) tensors[i].sum();
    model.close();
    const int64_t before = model.residency->gathers_issued();
    at::NoGradGuard no_grad;
    double_all(model);
    EXPECT_EQ(model.residency->gathers_issued() - before, 1);
    EXPECT_EQ(model.residency->live_bytes(), 4 * model.units[5]->numel());
    EXPECT_TRUE(is_constant(tensors[5].clone(), 12));
    model.close();
  });
}

TEST(Residency, TurnsFromForwardToBackwardWithWhatIsWhole) {
  run_ranks(2, [](const World& world) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < 6; ++i) tensors.push_back(at::full({1000}, static_cast<float>(i)));
    ShardedTensors model(world, "model", tensors,
                         {.max_live = 3200, .prefetch = 1 << 20, .max_reuse_distance = 1 << 20});
    for (int pass = 0; pass < 3; ++pass) {
      const int64_t before = model.residency->gathers_issued();
      for (int i = 0; i < 6; ++i) tensors[i].sum();
      EXPECT_EQ(model.residency->live_bytes() / 4 / model.units[0]->numel(), 3);
      const int64_t turn = model.residency->gathers_issued();
      for (int i = 5; i >= 0; --i) tensors[i].sum();
      EXPECT_EQ(model.residency->gathers_issued() - turn, 3) << "the last three are whole at the turn";
      model.close();
      at::NoGradGuard no_grad;
      double_all(model);
      EXPECT_EQ(model.residency->gathers_issued() - before, pass == 0 ? 12 : 9) << "with those of the next pass";
    }
  });
}

/// A shard that cannot be read until it is mended.
class BrokenStore : public tiers::CopyingStore {
 public:
  BrokenStore(const Tensor& flat, const bool& broken) : CopyingStore(flat), broken_(broken) {}
  Tensor open(tiers::Block block, tiers::Access access) override {
    if (broken_ && access == tiers::Access::read) throw std::runtime_error("reading a block failed");
    return CopyingStore::open(block, access);
  }

 private:
  const bool& broken_;
};

TEST(Residency, GathersAnewAfterAShardThatCouldNotBeRead) {
  run_ranks(1, [](const World& world) {
    bool broken = false;
    const auto place = [&](const UnitLayout& layout) -> tiers::Buffer {
      const Tensor zeros = at::zeros({layout.shard}, layout.dtype);
      return {std::make_shared<BrokenStore>(zeros, broken), layout.shard, layout.dtype, 50};
    };
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, {}, 1, kPatience, place);
    broken = true;
    EXPECT_THROW(tensors[4].sum(), std::runtime_error);
    broken = false;
    EXPECT_FALSE(model.any_pinned());
    EXPECT_EQ(model.residency->live_bytes(), 0);
    EXPECT_TRUE(is_constant(tensors[4].clone(), 5));
    model.close();
  });
}

TEST(Residency, AnnouncesTheShardsToComeNearestFirst) {
  run_ranks(2, [](const World& world) {
    std::vector<std::pair<std::string, int64_t>> asked;
    struct Store : tiers::CopyingStore {
      Store(const UnitLayout& layout, std::vector<std::pair<std::string, int64_t>>& asked)
          : CopyingStore(at::zeros({layout.shard})), name(layout.name), all(asked) {}
      void prefetch(tiers::Block block) override { all.emplace_back(name, block.begin); }
      std::string name;
      std::vector<std::pair<std::string, int64_t>>& all;
    };
    const auto place = [&](const UnitLayout& layout) -> tiers::Buffer {
      return {std::make_shared<Store>(layout, asked), layout.shard, layout.dtype, layout.shard};
    };
    const auto tensors = constants();
    constexpr int64_t kBytes = (176 + 32 + 512) * 4;  // the shards of p2, p3 and p4, with padding
    ShardedTensors model(world, "model", tensors, {.read_ahead_bytes = kBytes}, 1, kPatience, place);
    tensors[1].sum();
    const std::vector<std::pair<std::string, int64_t>> expected{{"p2", 0}, {"p3", 0}, {"p4", 0}};
    EXPECT_EQ(asked, expected);
    model.close();
  });
}

TEST(Residency, LeavesNothingPinnedWhenThePeersDoNotCome) {
  run_ranks(2, [](const World& world) {
    const auto tensors = constants();
    ShardedTensors model(world, "model", tensors, {}, 1, std::chrono::milliseconds(1000));
    if (world.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      return;
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        tensors[4].sum();
        ADD_FAILURE() << "rank 1 never came";
      } catch (const std::exception& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("'p4'"), std::string::npos) << text;
        EXPECT_NE(text.find("step 0, forward"), std::string::npos) << text;
      }
      EXPECT_FALSE(model.any_pinned());
    }
  });
}

}  // namespace
}  // namespace deeptide::sharding
