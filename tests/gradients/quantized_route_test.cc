// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradients that travel in few bits: the sum of what was rounded, in fewer bytes, and what is not finite still shows.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "gradients/training.h"

namespace deeptide::gradients {
namespace {

using at::Tensor;
using numerics::quantized_bytes;

Tensor rounded(const Tensor& values, int bits) {
  const Tensor message = at::empty({quantized_bytes(values.numel(), bits)}, at::kByte), out = at::empty_like(values);
  numerics::quantize(values, bits, message);
  numerics::dequantize(message, bits, out);
  return out;
}

/// The row of a unit that a rank sends to the rank that owns this shard.
Tensor row_of(const Training& training, int rank, int u, int pass) {
  const sharding::Unit& unit = *training.units[static_cast<size_t>(u)];
  const Tensor bucket = at::zeros({unit.numel()});
  for (size_t p = 0; p < unit.parameters().size(); ++p) {
    const sharding::Parameter& parameter = unit.parameters()[p];
    bucket.narrow(0, parameter.offset, parameter.numel)
        .copy_(gradient_of(rank, u, static_cast<int>(p), parameter.numel, pass));
  }
  return bucket.narrow(0, unit.shard_begin(), unit.layout().shard);
}

struct Case {
  int bits, ranks;
  bool side_thread;
};

class QuantizedRoute : public testing::TestWithParam<Case> {
 protected:
  ReducerOptions options() const {
    return {.bits = GetParam().bits, .side_thread = GetParam().side_thread, .scale = 1.0 / GetParam().ranks};
  }
};

TEST_P(QuantizedRoute, SumsWhatEachRankRounded) {
  const auto [bits, ranks, side_thread] = GetParam();
  run_ranks(ranks, [&](const World& w) {
    Training training(w, options());
    for (int pass = 0; pass < 3; ++pass) {
      training.backwards(
          [&](int u, int p, int64_t n) { training.reducer->add(u, p, gradient_of(w.rank, u, p, n, pass)); });
      training.finish();
      for (int u = 0; u < static_cast<int>(kSizes.size()); ++u) {
        std::vector<Tensor> rows;
        for (int rank = 0; rank < ranks; ++rank) rows.push_back(rounded(row_of(training, rank, u, pass), bits));
        const Tensor expected = sum_by_pairs(rows).mul(static_cast<float>(options().scale));
        EXPECT_TRUE(at::equal(training.reducer->gradient(u).sum(), expected)) << "unit " << u << ", pass " << pass;
      }
      const numerics::QuantizationLoss lost = training.reducer->take_lost();
      EXPECT_GT(lost.squares, 0.0);
      EXPECT_LE(lost.largest, numerics::largest_loss(bits) + 3e-7);
      EXPECT_EQ(training.reducer->take_lost().of_squares, 0.0) << "taken";
      training.reducer->clear_accumulated();
    }
    training.expect_memory_as_predicted();
  });
}

TEST_P(QuantizedRoute, AddsWhatRoundingHasLeftToTheNextContribution) {
  const auto [bits, ranks, side_thread] = GetParam();
  ReducerOptions fed = options();
  fed.feedback = true;
  run_ranks(ranks, [&](const World& w) {
    Training training(w, fed);
    std::map<std::pair<int, int>, Tensor> errors;  // by rank and unit, of this rank's shard
    for (int pass = 0; pass < 4; ++pass) {
      const double loss_scale = pass < 2 ? 1.0 : 8.0;
      training.reducer->set_loss_scale(loss_scale);
      training.backwards(
          [&](int u, int p, int64_t n) { training.reducer->add(u, p, gradient_of(w.rank, u, p, n, pass)); });
      training.finish();
      for (int u = 0; u < static_cast<int>(kSizes.size()); ++u) {
        std::vector<Tensor> rows;
        for (int rank = 0; rank < ranks; ++rank) {
          Tensor& error = errors[{rank, u}];
          const Tensor row = row_of(training, rank, u, pass);
          const Tensor value = error.defined() ? row + error * loss_scale : row;
          rows.push_back(rounded(value, bits));
          error = (value - rows.back()) / loss_scale;
        }
        const Tensor expected = sum_by_pairs(rows).mul(static_cast<float>(fed.scale));
        EXPECT_TRUE(at::equal(training.reducer->gradient(u).sum(), expected)) << "unit " << u << ", pass " << pass;
        const sharding::Unit& unit = *training.units[static_cast<size_t>(u)];
        const Tensor kept = training.reducer->rounding_errors()[static_cast<size_t>(u)];
        const Tensor own = kept.narrow(0, unit.shard_begin(), unit.layout().shard);
        EXPECT_TRUE(at::equal(own, errors[{w.rank, u}])) << "unit " << u << ", pass " << pass;
      }
      training.reducer->clear_accumulated();
    }
    training.expect_memory_as_predicted();
    ReducerOptions without = fed;
    without.feedback = false;
    std::vector<sharding::Unit*> all;
    int64_t numel = 0;
    for (const auto& unit : training.units) all.push_back(unit.get()), numel += unit->numel();
    EXPECT_EQ(training.reducer->predicted().communication -
                  forecast(sharding::layouts_of(all), without, ranks, false).communication,
              numel * 4);
  });
}

TEST_P(QuantizedRoute, LeavesNoErrorOfAnElementThatIsNotFinite) {
  const auto [bits, ranks, side_thread] = GetParam();
  ReducerOptions fed = options();
  fed.feedback = true;
  run_ranks(ranks, [&](const World& w) {
    Training training(w, fed);
    training.backwards([&](int u, int p, int64_t n) {
      const Tensor gradient = gradient_of(w.rank, u, p, n);
      gradient[0] = p == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
      training.reducer->add(u, p, gradient);
    });
    training.finish();
    double total = 0.0;
    for (const Tensor& error : training.reducer->rounding_errors()) total += error.abs().sum().item<double>();
    EXPECT_TRUE(std::isfinite(total));
    EXPECT_GT(total, 0.0) << "of their neighbours";
  });
}

TEST_P(QuantizedRoute, SendsTheBytesOfItsMessages) {
  const auto [bits, ranks, side_thread] = GetParam();
  run_ranks(ranks, [&](const World& w) {
    Training training(w, options());
    training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, at::full({n}, 1.0f)); });
    training.finish();
    int64_t expected = 0;
    for (const auto& unit : training.units) expected += (ranks - 1) * quantized_bytes(unit->layout().shard, bits);
    EXPECT_EQ(training.group.sent_bytes(), expected);
  });
}

TEST_P(QuantizedRoute, NamesTheParameterAndTheRankOfANonFiniteGradient) {
  const auto [bits, ranks, side_thread] = GetParam();
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<std::optional<BadGradient>> found(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](const World& w) {
      Training training(w, options());
      training.backwards([&](int u, int p, int64_t n) {
        const Tensor gradient = gradient_of(w.rank, u, p, n);
        if (w.rank == 1 && u == 2 && p == 1) gradient[1] = bad;  // beside others in its block
        training.reducer->add(u, p, gradient);
      });
      training.finish();
      const bool finite = std::isfinite(training.reducer->sum_of_squares());
      if (!finite) found[static_cast<size_t>(w.rank)] = training.reducer->bad();
      EXPECT_EQ(finite, !found[static_cast<size_t>(w.rank)].has_value());
    });
    const auto named = std::find_if(found.begin(), found.end(), [](const auto& each) { return each.has_value(); });
    ASSERT_NE(named, found.end());
    EXPECT_EQ((*named)->unit, 2);
    EXPECT_EQ((*named)->parameter, 1);
    EXPECT_EQ((*named)->rank, world::WorldRank(1));
  }
}

TEST(QuantizedRouteAlone, LeavesOneRanksGradientsAsTheyAre) {
  run_ranks(1, [&](const World& w) {
    Training training(w, {.bits = 4});
    training.backwards([&](int u, int p, int64_t n) { training.reducer->add(u, p, gradient_of(0, u, p, n)); });
    training.finish();
    training.backwards([&](int u, int p, int64_t n) { training.expect_sum(u, p, gradient_of(0, u, p, n)); });
    EXPECT_EQ(training.reducer->take_lost().of_squares, 0.0);
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, QuantizedRoute,
                         testing::Values(Case{8, 2, false}, Case{4, 2, true}, Case{8, 3, true}, Case{4, 4, false}));

}  // namespace
}  // namespace deeptide::gradients
