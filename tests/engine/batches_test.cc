// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One call for a step gives what the loop of forward, backward and step gives.
#include "deeptide/batches.h"

#include <gtest/gtest.h>

#include "engine/session.h"
#include "ranks.h"

namespace deeptide {
namespace {

constexpr int64_t kAccumulation = 3;

/// Losses of micro-batches 0, 1, 2, … of a step, and their mean on this rank.
struct Losses {
  at::Tensor operator()() {
    at::Tensor loss = session.loss(step, micro++);
    sum += loss.item<double>();
    return loss;
  }
  TrainingSession& session;
  int64_t step;
  int64_t micro = 0;
  double sum = 0.0;
};

double mean_of_ranks(const World& world, TrainingSession& session, double own) {
  double sum = 0.0;
  for (int rank = 0; rank < world.size; ++rank) {
    const at::Tensor value = at::full({1}, own, at::kDouble);
    session.engine.broadcast(value, rank);
    sum += value.item<double>();
  }
  return sum / world.size;
}

class Batches : public testing::TestWithParam<int> {};

TEST_P(Batches, TrainAsTheLoopDoes) {
  run_ranks(2, [&](const World& world) {
    const Config config = config_of(GetParam(), TrainingSession::kMicro, kAccumulation);
    TrainingSession loop(world, kAccumulation, config), call(world, kAccumulation, config);
    for (int64_t step = 0; step < 3; ++step) {
      const StepOutcome expected = loop.step(step);
      Losses losses{call, step};
      const BatchOutcome outcome = train_batch(call.engine, std::ref(losses));
      EXPECT_EQ(losses.micro, kAccumulation);
      EXPECT_TRUE(outcome.step.applied());
      EXPECT_EQ(outcome.step.grad_norm, expected.grad_norm);
      EXPECT_NEAR(outcome.loss, mean_of_ranks(world, call, losses.sum / kAccumulation), 1e-12);
    }
    loop.seen.clear();
    expect_equal_results(call.results(), loop.results());
  });
}

TEST_P(Batches, EvaluateWithoutGradients) {
  run_ranks(2, [&](const World& world) {
    TrainingSession session(world, kAccumulation, config_of(GetParam(), TrainingSession::kMicro, kAccumulation));
    Losses losses{session, 0};
    const double mean = eval_batch(session.engine, std::ref(losses));
    EXPECT_EQ(losses.micro, kAccumulation);
    EXPECT_NEAR(mean, mean_of_ranks(world, session, losses.sum / kAccumulation), 1e-12);
    EXPECT_FALSE(session.engine.has_gradients());
    Losses one{session, 1};
    const double of_one = eval_batch(session.engine, std::ref(one), 1);
    EXPECT_NEAR(of_one, mean_of_ranks(world, session, one.sum), 1e-12);
    EXPECT_EQ(one.micro, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Batches, testing::Values(0, 2, 3));

TEST(TrainBatch, RefusesGradientsThatAreThereAndLossesThatAreNoScalars) {
  run_ranks(1, [&](const World& world) {
    TrainingSession session(world, 2, config_of(1, TrainingSession::kMicro, 2));
    const auto loss = [&] { return session.loss(0); };
    EXPECT_THROW(train_batch(session.engine, [&] { return session.loss(0).expand({2}); }), c10::ValueError);
    session.engine.backward(loss());
    EXPECT_THROW(train_batch(session.engine, loss), c10::ValueError);
    session.engine.zero_grad();
    EXPECT_NO_THROW(train_batch(session.engine, loss));
  });
}

}  // namespace
}  // namespace deeptide
