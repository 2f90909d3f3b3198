// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A plan has the numbers of the engine that it plans.
#include "deeptide/plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "engine/models.h"
#include "on_hosts.h"
#include "ranks.h"

namespace deeptide {
namespace {

TEST(Plan, IsWhatTheEngineForecasts) {
  for (const int ranks : {1, 2, 3}) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const auto where : {Ranks::together, Ranks::apart}) {
        run_ranks(ranks, [&](const World& world) {
          TinyModel model = make_tiny();
          const Config config = config_of(stage, 2, /*gas=*/1 + stage % 2, /*bf16=*/stage > 1, where);
          const MemoryPlan planned = plan(describe(*model), config, {}, {.size = world.size});
          const Engine engine = engine_of(*model, world, config);
          const auto lines = engine.memory();
          ASSERT_EQ(planned.lines.size(), lines.size());
          for (size_t i = 0; i < lines.size(); ++i) {
            SCOPED_TRACE(text(lines[i].role));
            EXPECT_EQ(planned.lines[i].role, lines[i].role);
            EXPECT_EQ(planned.lines[i].memory_bytes, lines[i].predicted_bytes);
            EXPECT_EQ(planned.lines[i].late_bytes, lines[i].late_bytes);
            EXPECT_EQ(planned.lines[i].file_bytes, 0);
          }
        });
      }
    }
  }
}

/// The bytes that a step sends in the end, when all steps do alike.
int64_t sent_by_a_step(Engine& engine, TinyModel& model, int gas) {
  int64_t sent = 0;
  for (int micro = 0; micro < 4 * gas; ++micro) {
    const auto [tokens, targets] = batch_of(micro, 2);
    engine.backward(model(tokens, targets));
    const StepOutcome outcome = engine.step();
    if (outcome.applied()) sent = outcome.sent_bytes;
  }
  return sent;
}

TEST(Plan, ForecastsTheBytesThatAStepSends) {
  for (const int ranks : {2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const int gas : {1, 3}) {
        run_ranks(ranks, [&](const World& world) {
          SCOPED_TRACE("stage " + std::to_string(stage) + ", gas " + std::to_string(gas));
          TinyModel model = make_tiny();
          const Config config = config_of(stage, 2, gas, /*bf16=*/stage == 1, Ranks::apart);
          const MemoryPlan planned = plan(describe(*model), config, {}, {.size = world.size, .ranks_per_host = 1});
          int64_t between = 0;
          for (const PlanTransfer& transfer : planned.transfers) {
            EXPECT_EQ(transfer.within_bytes, 0);
            EXPECT_EQ(transfer.between_bytes, transfer.bytes / ranks * (ranks - 1)) << transfer.kind;
            between += transfer.between_bytes;
          }
          Engine engine = engine_of(*model, world, config);
          const int64_t sent = sent_by_a_step(engine, model, gas);
          EXPECT_GT(sent, 0);
          EXPECT_NEAR(static_cast<double>(between), static_cast<double>(sent), 0.05 * static_cast<double>(sent));
        });
      }
    }
  }
}

TEST(Plan, TellsWhichBytesLeaveTheHost) {
  TinyModel model = make_tiny();
  for (const int stage : {0, 1, 3}) {
    const Config apart = config_of(stage, 2, 1, /*bf16=*/false, Ranks::apart);
    const auto of = [&](int ranks_per_host) {
      return plan(describe(*model), apart, {}, {.size = 4, .ranks_per_host = ranks_per_host}).transfers;
    };
    const auto one_host = of(4), two_hosts = of(2);
    ASSERT_EQ(one_host.size(), two_hosts.size());
    for (size_t i = 0; i < one_host.size(); ++i) {
      EXPECT_EQ(one_host[i].between_bytes, 0);
      EXPECT_EQ(one_host[i].within_bytes, 3 * two_hosts[i].within_bytes);
      EXPECT_EQ(two_hosts[i].between_bytes, 2 * two_hosts[i].within_bytes);
    }
    const Config together = config_of(stage, 2, 1, /*bf16=*/false, Ranks::together);
    const auto by_hosts = plan(describe(*model), together, {}, {.size = 4, .ranks_per_host = 2}).transfers;
    EXPECT_LT(by_hosts.front().between_bytes, two_hosts.front().between_bytes) << "a host sums first";
  }
}

TEST(Plan, IsWhatTheEngineForecastsAndTakesOnSeveralHosts) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 0, 1, 1}, {0, 0, 0, 0, 1, 1, 1, 1}}) {
    for (const int stage : {0, 1, 2, 3}) {
      run_on_hosts(hosts, [&](const World& world) {
        TinyModel model = make_tiny();
        const Config config = config_of(stage, 2, /*gas=*/1 + stage % 2, /*bf16=*/stage == 2);
        const MemoryPlan planned = plan(describe(*model), config, {},
                                        {.size = world.size, .ranks_per_host = static_cast<int>(hosts.size()) / 2});
        Engine engine = engine_of(*model, world, config);
        for (int micro = 0; micro < 4; ++micro) {
          const auto [tokens, targets] = batch_of(micro, 2 * world.size);
          engine.backward(model(tokens.narrow(0, world.rank * 2, 2), targets.narrow(0, world.rank * 2, 2)));
          engine.step();
        }
        const auto lines = engine.memory();
        ASSERT_EQ(planned.lines.size(), lines.size());
        for (size_t i = 0; i < lines.size(); ++i) {
          SCOPED_TRACE(std::string(text(lines[i].role)) + ", stage " + std::to_string(stage));
          EXPECT_EQ(planned.lines[i].memory_bytes, lines[i].predicted_bytes);
          EXPECT_EQ(planned.lines[i].late_bytes, lines[i].late_bytes);
          EXPECT_LE(lines[i].measured_bytes, lines[i].predicted_bytes);
          EXPECT_LE(lines[i].measured_late_bytes, lines[i].late_bytes);
        }
      });
    }
  }
}

TEST(Plan, RefusesHostsThatAreNotWhole) {
  TinyModel model = make_tiny();
  EXPECT_THROW(plan(describe(*model), config_of(2), {}, {.size = 3, .ranks_per_host = 2}), c10::ValueError);
  EXPECT_THROW(plan(describe(*model), config_of(2), {}, {.size = 0}), c10::ValueError);
}

TEST(Plan, RecommendsTheFirstSettingThatFitsTheMachine) {
  TinyModel model = make_tiny();
  const Config config = config_of(2, 2, /*gas=*/1, /*bf16=*/true, Ranks::apart);
  const auto recommended = [&](const MachineLimits& machine) -> std::string {
    for (const PlanChoice& choice : plan_choices(describe(*model), config, machine, {}, {.size = 2})) {
      EXPECT_EQ(choice.why_not, why_not(choice.plan, machine));
      if (choice.why_not.empty()) return choice.sections;
    }
    return "";
  };
  constexpr int64_t kPlenty = int64_t{1} << 40;
  const auto bytes_of = [&](const std::string& patch) {
    return plan(describe(*model), config.with(patch), {}, {.size = 2}).host_bytes();
  };
  const int64_t whole = bytes_of(R"({"zero_optimization": {"stage": 0}})");
  EXPECT_EQ(recommended({.memory_bytes = kPlenty, .bound = "a test"}), R"({"zero_optimization":{"stage":0}})");
  EXPECT_EQ(recommended({.memory_bytes = whole - 1, .bound = "a test"}), R"({"zero_optimization":{"stage":1}})");
  EXPECT_EQ(recommended({.memory_bytes = 1, .bound = "a test"}), "");
}

TEST(Plan, SaysWhichDiskLacksRoom) {
  MemoryPlan plan;
  plan.world.ranks_per_host = 2;
  plan.lines.push_back({.role = MemoryRole::optimizer_states, .file_bytes = 50});  // 100 on the host
  const auto answer = [&](std::vector<FolderSpace> folders) { return why_not(plan, {.folders = std::move(folders)}); };
  EXPECT_EQ(answer({{"/a", 100, 1}}), "");
  EXPECT_EQ(answer({{"/a", 99, 1}}), "files take 100 bytes of /a, which has 99 bytes free");
  EXPECT_EQ(answer({{"/a", 50, 1}, {"/b", 50, 2}}), "") << "striped";
  EXPECT_EQ(answer({{"/a", 60, 1}, {"/b", 49, 2}}), "files take 50 bytes of /b, which has 49 bytes free");
  EXPECT_EQ(answer({{"/a", 99, 1}, {"/b", 99, 1}}), "files take 100 bytes of /a, which has 99 bytes free");
  EXPECT_EQ(answer({}), "no folder for files is known");
  plan.phases.push_back({"training", 10});
  EXPECT_EQ(answer({{"/a", 100, 1}}), "the ranks of a host take 20 bytes, and  leaves 0 bytes");
}

TEST(Plan, KnowsThisMachinesLimits) {
  const MachineLimits machine = machine_limits({"/tmp/not/there/yet"});
  EXPECT_GT(machine.memory_bytes, 0);
  EXPECT_FALSE(machine.bound.empty());
  ASSERT_EQ(machine.folders.size(), 1U);
  EXPECT_GT(machine.folders[0].free_bytes, 0);
  EXPECT_NE(machine.folders[0].device, 0U);
}

TEST(Plan, GivesEachHostsRanksNoSharedMemoryAcrossHosts) {
  TinyModel model = make_tiny();
  EXPECT_TRUE(plan(describe(*model), config_of(2), {}, {.size = 4}).shares_memory);
  EXPECT_FALSE(plan(describe(*model), config_of(2), {}, {.size = 4, .ranks_per_host = 2}).shares_memory);
}

}  // namespace
}  // namespace deeptide
