// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gathers under way: bounded, ended in their order, every rank's part in its place.
#include "zero/transfers/unit_gathers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "ranks.h"
#include "world/failure_board.h"

namespace deeptide::zero {
namespace {

using at::Tensor;

constexpr std::chrono::seconds kLimit{60};

TEST(UnitGathers, EndInTheirOrderAndFillTheirRoomOnly) {
  for (const int size : {2, 3}) {
    run_ranks(size, [&](const World& world) {
      const auto board = std::make_shared<world::FailureBoard>(world, "board");
      comm::Group group(world, comm::Team::whole(world), "test", {.timeout = kLimit, .board = board});
      UnitGathers gathers(group, "gathering");
      const int64_t numel = kBytesUnderWay / static_cast<int64_t>(sizeof(float)) / 2 / size;  // two fill the room
      const auto part = [&](int64_t unit, int64_t rank) {
        return at::arange(unit * 10 + rank, unit * 10 + rank + numel, at::kFloat);
      };
      constexpr int64_t kUnits = 5;
      int64_t started = 0;
      for (int64_t unit = 0; unit < kUnits; ++unit) {
        for (; started < kUnits && gathers.has_room(); ++started) {
          gathers.start("h." + std::to_string(started), at::empty({size * numel}), part(started, world.rank));
        }
        EXPECT_LE(started - unit, 3) << "as many as fill the room, the last perhaps in part";
        EXPECT_GE(started - unit, std::min<int64_t>(2, kUnits - unit));
        const Tensor whole = gathers.wait_first();
        for (int64_t rank = 0; rank < size; ++rank) {
          EXPECT_TRUE(at::equal(whole.narrow(0, rank * numel, numel), part(unit, rank))) << unit << " of " << rank;
        }
      }
    });
  }
}

}  // namespace
}  // namespace deeptide::zero
