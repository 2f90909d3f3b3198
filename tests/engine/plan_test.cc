// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A plan has the numbers of the engine that it plans.
#include "deeptide/plan.h"

#include <gtest/gtest.h>

#include "deeptide/engine.h"
#include "engine/models.h"
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

TEST(Plan, RefusesHostsThatAreNotWhole) {
  TinyModel model = make_tiny();
  EXPECT_THROW(plan(describe(*model), config_of(2), {}, {.size = 3, .ranks_per_host = 2}), c10::ValueError);
  EXPECT_THROW(plan(describe(*model), config_of(2), {}, {.size = 0}), c10::ValueError);
}

TEST(Plan, GivesEachHostsRanksNoSharedMemoryAcrossHosts) {
  TinyModel model = make_tiny();
  EXPECT_TRUE(plan(describe(*model), config_of(2), {}, {.size = 4}).shares_memory);
  EXPECT_FALSE(plan(describe(*model), config_of(2), {}, {.size = 4, .ranks_per_host = 2}).shares_memory);
}

}  // namespace
}  // namespace deeptide
