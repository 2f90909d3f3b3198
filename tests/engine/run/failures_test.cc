// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A rank that fails in a call and keeps its engine: the others end their waits, or wait if it goes on.
#include <gtest/gtest.h>

#include "engine/session.h"
#include "on_hosts.h"

namespace deeptide {
namespace {

/// Rank 1's backward refuses a loss that is no scalar.
void fail_in_backward(TrainingSession& session) {
  EXPECT_ANY_THROW(session.engine.backward(torch::ones({2}, torch::requires_grad())));
}

TEST(EngineFailures, EndTheOthersWaitsThoughTheRankKeepsItsEngine) {
  for (const Config& sharing : {config_of(1), apart(config_of(3))}) {
    const Config config = sharing.with(R"({"deeptide": {"error_grace": 0.5}})");
    Meeting meeting(3);
    const auto errors = errors_of_ranks(3, [&](const World& world) {
      TrainingSession session(world, 1, config);
      session.step(0);
      meeting.arrive_after([&] {
        if (world.rank == 1) fail_in_backward(session);
        if (world.rank != 1) session.step(1);
      });
    });
    EXPECT_EQ(errors[1], "");
    for (int r : {0, 2}) {
      EXPECT_NE(errors[r].find("rank 1 failed in backward: "), std::string::npos) << errors[r];
    }
  }
}

TEST(EngineFailures, HoldNobodyUpOnceTheRankGoesOn) {
  run_ranks(2, [](const World& world) {
    TrainingSession session(world, 1, config_of(1));
    for (int step = 0; step < 3; ++step) {
      if (world.rank == 1) fail_in_backward(session);
      session.step(step);
    }
    session.engine.report_error("failed in forward", "on both ranks");
    session.engine.withdraw_error();
    session.step(3);
    EXPECT_EQ(session.engine.global_steps(), 4);
  });
}

}  // namespace
}  // namespace deeptide
