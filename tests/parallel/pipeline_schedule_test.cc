// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Every schedule on stages 1 to 16 and micro-batches 1 to 64: it ends, its bubble and its peak are the published ones.
#include "deeptide/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "errors.h"

namespace deeptide {
namespace {

using Instructions = std::vector<std::vector<StageInstruction>>;
constexpr StageCosts kCosts{.forward = 2, .backward_input = 2, .backward_weight = 2, .transfer = 0};

void on_the_grid(const std::function<void(const PipelineShape&)>& check) {
  for (int stages = 1; stages <= 16; ++stages) {
    for (int micro_batches = 1; micro_batches <= 64; ++micro_batches) {
      SCOPED_TRACE(std::to_string(stages) + " stages, " + std::to_string(micro_batches) + " micro-batches");
      check({.stages = stages, .micro_batches = micro_batches});
      if (testing::Test::HasFailure()) return;
    }
  }
}

/// All stages have the same work, so each waits for what `time` has beyond it.
void expect_step(const SimulatedStep& step, double work, double idle, PipelineSchedule schedule,
                 const PipelineShape& shape) {
  EXPECT_DOUBLE_EQ(step.time, work + idle);
  for (int stage = 0; stage < shape.stages; ++stage) {
    const auto i = static_cast<size_t>(stage);
    EXPECT_NEAR(step.idle[i], idle, 1e-9);
    EXPECT_EQ(step.peak_activations[i], published_peak_activations(schedule, shape, stage)) << "stage " << stage;
  }
  EXPECT_NEAR(step.bubble(), idle / (work + idle), 1e-12);
}

TEST(PipelineSchedule, GPipeAndOneForwardOneBackwardHaveThePublishedBubbleAndPeak) {
  on_the_grid([](const PipelineShape& shape) {
    for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
      const double idle = published_idle_time(schedule, shape, kCosts);
      EXPECT_EQ(idle, 6 * (shape.stages - 1));
      expect_step(simulate(schedule, shape, kCosts), 6 * shape.micro_batches, idle, schedule, shape);
    }
    EXPECT_EQ(published_peak_activations(PipelineSchedule::gpipe, shape, 0), shape.micro_batches);
    const int last = shape.stages - 1;
    EXPECT_EQ(published_peak_activations(PipelineSchedule::one_f_one_b, shape, last), 1);
    EXPECT_EQ(published_peak_activations(PipelineSchedule::one_f_one_b, shape, 0),
              std::min(shape.stages, shape.micro_batches));
  });
}

TEST(PipelineSchedule, InterleavedNeverDeadlocksAndHasThePublishedBubbleWhereStagesDivideMicroBatches) {
  for (const int chunks : {2, 3, 4}) {
    on_the_grid([&](PipelineShape shape) {
      shape.chunks = chunks;
      const StageCosts costs{.forward = 1.0 * chunks, .backward_input = 1.0 * chunks, .backward_weight = 1.0 * chunks};
      const SimulatedStep step = simulate(PipelineSchedule::interleaved, shape, costs);
      const double work = 3.0 * chunks * shape.micro_batches;
      const double idle = published_idle_time(PipelineSchedule::interleaved, shape, costs);
      EXPECT_EQ(idle, 3 * (shape.stages - 1));
      if (shape.micro_batches % shape.stages == 0) {
        expect_step(step, work, idle, PipelineSchedule::interleaved, shape);
      } else {
        EXPECT_GE(step.time, work + idle);
        // Never worse than a pipeline whose every part is a stage of its own.
        EXPECT_LE(step.time, work + 3 * (shape.stages * chunks - 1));
      }
    });
  }
}

TEST(PipelineSchedule, ZeroBubbleWaitsAThirdAsLongInTheMemoryOfTheFirstStage) {
  on_the_grid([](const PipelineShape& shape) {
    const SimulatedStep step = simulate(PipelineSchedule::zero_bubble, shape, kCosts);
    // With fewer micro-batches than stages, the first stage has no forwards left to wait with.
    const int missing = std::max(0, shape.stages - shape.micro_batches);
    const double idle = published_idle_time(PipelineSchedule::zero_bubble, shape, kCosts) + 2 * missing;
    expect_step(step, 6 * shape.micro_batches, idle, PipelineSchedule::zero_bubble, shape);
    EXPECT_LE(step.time, simulate(PipelineSchedule::one_f_one_b, shape, kCosts).time);
  });
}

TEST(PipelineSchedule, SurvivesSlowTransfersAndUnequalCosts) {
  const StageCosts costs{.forward = 1.5, .backward_input = 0.5, .backward_weight = 2.25, .transfer = 7.0};
  on_the_grid([&](const PipelineShape& shape) {
    for (int kind = 0; kind < 4; ++kind) {
      const auto schedule = static_cast<PipelineSchedule>(kind);
      const SimulatedStep step = simulate(schedule, shape, costs);
      const double path = (shape.stages - 1) * (2 * costs.transfer + costs.forward + costs.backward_input);
      EXPECT_GE(step.time, path + costs.forward + costs.backward_input + costs.backward_weight - 1e-9);
      for (int stage = 0; stage < shape.stages; ++stage) {
        EXPECT_EQ(step.peak_activations[static_cast<size_t>(stage)],
                  published_peak_activations(schedule, shape, stage));
      }
    }
  });
}

TEST(PipelineSchedule, OrdersAStepOfThreeStages) {
  const PipelineShape shape{.stages = 3, .micro_batches = 3};
  std::string list;
  for (const auto& step : stage_instructions(PipelineSchedule::one_f_one_b, shape, 1)) list += text(step) + "; ";
  EXPECT_EQ(list,
            "receive_activation 0; forward 0; send_activation 0; "
            "receive_activation 1; forward 1; send_activation 1; receive_gradient 0; backward 0; send_gradient 0; "
            "receive_activation 2; forward 2; send_activation 2; receive_gradient 1; backward 1; send_gradient 1; "
            "receive_gradient 2; backward 2; send_gradient 2; ");
  list.clear();
  for (const auto& step : stage_instructions(PipelineSchedule::zero_bubble, shape, 2)) list += text(step) + "; ";
  EXPECT_EQ(list,
            "receive_activation 0; forward 0; backward_input 0; send_gradient 0; "
            "receive_activation 1; forward 1; backward_input 1; send_gradient 1; "
            "receive_activation 2; forward 2; backward_input 2; send_gradient 2; "
            "backward_weight 0; backward_weight 1; backward_weight 2; ");
}

Instructions lists(const PipelineShape& shape) {
  Instructions all;
  for (int stage = 0; stage < shape.stages; ++stage) {
    all.push_back(stage_instructions(PipelineSchedule::one_f_one_b, shape, stage));
  }
  return all;
}

TEST(PipelineSimulator, NamesADeadlockAndItsStages) {
  const PipelineShape shape{.stages = 2, .micro_batches = 1};
  Instructions all = lists(shape);
  std::rotate(all[0].begin(), all[0].begin() + 2, all[0].end());  // waits for a gradient before its forward
  EXPECT_EQ(
      error_of([&] { simulate(all, shape); }),
      "a pipeline's schedule deadlocks: stage 0 at receive_gradient 0, stage 1 at receive_activation 0 wait for a "
      "message");
}

TEST(PipelineSimulator, RefusesWhatAStageCannotDo) {
  const PipelineShape shape{.stages = 2, .micro_batches = 2};
  const auto error_without = [&](size_t stage, size_t index) {
    Instructions all = lists(shape);
    all[stage].erase(all[stage].begin() + static_cast<ptrdiff_t>(index));
    return error_of([&] { simulate(all, shape); });
  };
  EXPECT_EQ(error_without(1, 0), "a pipeline's schedule: stage 1: forward 0 lacks its activation");
  EXPECT_EQ(error_without(1, 1), "a pipeline's schedule: stage 1: backward 0 comes before its forward");
  EXPECT_EQ(error_without(0, 0), "a pipeline's schedule: stage 0: send_activation 0 comes before what it sends");
  EXPECT_EQ(error_without(0, 4), "a pipeline's schedule: stage 0: backward 0 lacks its gradient");
  EXPECT_EQ(error_without(0, 7), "a pipeline's schedule: no backward of micro-batch 1 in part 0 of the model");
  Instructions all = lists(shape);
  all[0].push_back({StageAction::forward, 0, 1});
  EXPECT_EQ(error_of([&] { simulate(all, shape); }), "a pipeline's schedule: stage 0: forward 1 occurs twice");
  all[0].back().micro_batch = 2;
  EXPECT_EQ(error_of([&] { simulate(all, shape); }),
            "a pipeline's schedule: stage 0: forward 2 is outside the pipeline's shape");
  all[0].back() = {StageAction::send_gradient, 0, 0};
  EXPECT_EQ(error_of([&] { simulate(all, shape); }), "a pipeline's schedule: stage 0: send_gradient 0 has no receiver");
}

TEST(PipelineSchedule, RefusesShapesThatAreNone) {
  const auto error = [](PipelineSchedule schedule, const PipelineShape& shape, int stage) {
    return error_of([&] { stage_instructions(schedule, shape, stage); });
  };
  EXPECT_EQ(error(PipelineSchedule::gpipe, {.stages = 0}, 0),
            "a pipeline's schedule: got 0 stages, 1 micro-batches and 1 chunks, expected at least one of each");
  EXPECT_EQ(error(PipelineSchedule::zero_bubble, {.stages = 2, .micro_batches = 4, .chunks = 2}, 0),
            "a pipeline's schedule: got 2 stages, 4 micro-batches and 2 chunks, but only the schedule interleaved has "
            "several chunks");
  EXPECT_EQ(error(PipelineSchedule::gpipe, {.stages = 2}, 2), "a pipeline's schedule: got stage 2, expected 0 to 1");
  EXPECT_EQ(error_of([] { simulate(Instructions(1), {.stages = 2}); }),
            "a pipeline's schedule: got lists for 1 stages, expected 2, and at least one micro-batch and chunk");
}

}  // namespace
}  // namespace deeptide
