// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The benchmark of collectives: right ones pass its check in every type and world, wrong ones do not.
#include "bench/collective_bench.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <gtest/gtest.h>

#include "on_hosts.h"
#include "ranks.h"

namespace deeptide::bench {
namespace {

using at::Tensor;

/// The contributions of all ranks, and the result of a collective that needs no transport for `rank`.
struct Exchange {
  Exchange(Collective collective, int world_size, int64_t numel, at::ScalarType dtype) {
    for (const int rank : c10::irange(world_size)) {
      shapes.push_back({collective, rank, world_size, numel});
      inputs.push_back(at::zeros({shapes.back().input_numel()}, dtype));
      fill_input(shapes.back(), inputs.back());
    }
  }

  Tensor output(int rank) const {
    const CollectiveShape& shape = shapes[rank];
    const int64_t row = shape.numel / shape.world_size;
    Tensor out = at::zeros({shape.output_numel()}, inputs[0].options());
    for (const int from : c10::irange(shape.world_size)) {
      switch (shape.collective) {
        case Collective::all_reduce:
          out += inputs[from];
          break;
        case Collective::reduce_scatter:
          out += inputs[from].narrow(0, rank * row, row);
          break;
        case Collective::all_gather:
          out.narrow(0, from * row, row).copy_(inputs[from]);
          break;
        case Collective::all_to_all:
          out.narrow(0, from * row, row).copy_(inputs[from].narrow(0, rank * row, row));
          break;
        case Collective::broadcast:
          out.copy_(inputs[0]);
          break;
      }
    }
    return out;
  }

  std::vector<CollectiveShape> shapes;
  std::vector<Tensor> inputs;
};

TEST(CollectiveCheck, PassesWhatIsRightInEveryTypeAndWorld) {
  for (const Collective collective : kCollectives) {
    for (const int world : {2, 3, 7, 150}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const Exchange exchange(collective, world, 5 * world, dtype);
        for (const int rank : {0, 1, world - 1}) {
          EXPECT_NO_THROW(check_output(exchange.shapes[rank], exchange.output(rank)))
              << name_of(collective) << ", " << world << " ranks, " << dtype;
        }
      }
    }
  }
}

TEST(CollectiveCheck, PassesWhatIsLongerThanItsPattern) {
  for (const Collective collective : kCollectives) {
    const Exchange exchange(collective, 3, 300'003, at::kFloat);
    EXPECT_NO_THROW(check_output(exchange.shapes[2], exchange.output(2))) << name_of(collective);
  }
}

TEST(CollectiveCheck, FindsOneWrongElement) {
  for (const Collective collective : kCollectives) {
    const Exchange exchange(collective, 3, 300'003, at::kBFloat16);
    Tensor output = exchange.output(1);
    const int64_t last = output.numel() - 1;
    output[last] += 1;
    try {
      check_output(exchange.shapes[1], output);
      ADD_FAILURE() << name_of(collective) << ": the wrong element was not found";
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_EQ(text.find("wrong result: " + std::string(name_of(collective)) + " of 600006 bytes, rank 1 of 3: "), 0u);
      EXPECT_NE(text.find("element " + std::to_string(last) + " is "), std::string::npos) << text;
    }
  }
}

TEST(CollectiveCheck, FindsAMissingRankAndSwappedRows) {
  for (const int missing : {0, 1, 2, 3, 4, 5, 6}) {
    const Exchange exchange(Collective::all_reduce, 7, 70, at::kFloat);
    EXPECT_ANY_THROW(check_output(exchange.shapes[0], exchange.output(0) - exchange.inputs[missing])) << missing;
  }
  for (const Collective collective : {Collective::all_gather, Collective::all_to_all}) {
    const Exchange exchange(collective, 2, 20, at::kFloat);
    EXPECT_ANY_THROW(check_output(exchange.shapes[0], exchange.output(0).roll(10))) << name_of(collective);
    EXPECT_ANY_THROW(check_output(exchange.shapes[0], exchange.output(0).roll(1))) << name_of(collective);
  }
  const Exchange scatter(Collective::reduce_scatter, 2, 20, at::kFloat);
  EXPECT_ANY_THROW(check_output(scatter.shapes[0], scatter.output(1))) << "another rank's slice";
}

TEST(CollectiveCheck, CountsWhatALinkMustCarry) {
  EXPECT_DOUBLE_EQ(bus_factor(Collective::all_reduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::all_gather, 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::reduce_scatter, 2), 0.5);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::all_to_all, 2), 0.5);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::broadcast, 8), 1.0);
  EXPECT_EQ(calls_for(64), 200);
  EXPECT_EQ(calls_for(4 << 20), 4);
  EXPECT_EQ(calls_for(64 << 20), 1);
}

/// Every collective, small, in a world on so many hosts; returns rank 0's path.
std::string measure_all(int num_ranks, int num_hosts, bool shared_memory, at::ScalarType dtype) {
  std::string path;
  const auto rank_main = [&](const World& given) {
    World world = given;
    world.host = "host-" + std::to_string(world.rank * num_hosts / num_ranks);
    constexpr int64_t kBytes = 1'000'000;  // few calls a trial
    CollectiveBench bench(world, dtype, at::kCPU, kBytes, shared_memory);
    if (world.rank == 0) path = bench.path();
    for (const Collective collective : kCollectives) {
      const CollectiveTimes times = bench.measure(collective, kBytes, 1, 2);
      EXPECT_EQ(times.bytes, kBytes / (64 * num_ranks) * (64 * num_ranks));
      ASSERT_EQ(times.seconds.size(), 2u);
      for (const double seconds : times.seconds) EXPECT_GT(seconds, 0.0);
      EXPECT_EQ(bench.measure(collective, 1, 0, 0).bytes, 64 * num_ranks) << "a line for each rank at least";
    }
  };
  for (const std::string& error : errors_of_ranks(num_ranks, rank_main)) EXPECT_EQ(error, "");
  return path;
}

TEST(CollectiveBench, MeasuresEveryCollectiveOnEveryPath) {
  EXPECT_EQ(measure_all(2, 1, true, at::kFloat), "shared memory");
  EXPECT_EQ(measure_all(3, 1, true, at::kBFloat16), "shared memory");
  EXPECT_EQ(measure_all(4, 2, true, at::kBFloat16), "two levels");
  EXPECT_EQ(measure_all(2, 2, true, at::kFloat), "c10d");
  EXPECT_EQ(measure_all(3, 1, false, at::kBFloat16), "c10d");
}

TEST(CollectiveBench, NeedsTwoRanksAndRoom) {
  const auto errors = errors_of_ranks(1, [](const World& world) { CollectiveBench(world, at::kFloat, at::kCPU, 64); });
  EXPECT_NE(errors[0].find("needs 2 ranks or more, got 1"), std::string::npos) << errors[0];
  for (const std::string& error : errors_of_ranks(2, [](const World& world) {
         CollectiveBench(world, at::kFloat, at::kCPU, 128).measure(Collective::all_gather, 256, 0, 1);
       })) {
    EXPECT_NE(error.find("the benchmark was made for 128"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace deeptide::bench
