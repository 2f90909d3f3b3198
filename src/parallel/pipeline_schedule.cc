// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Orders computing first, and puts each transfer beside the computation that needs or makes it.
#include "deeptide/pipeline_schedule.h"

#include <algorithm>
#include <iterator>

namespace deeptide {
namespace {

using Instructions = std::vector<StageInstruction>;

void check(PipelineSchedule schedule, const PipelineShape& shape, int stage) {
  const std::string got = std::to_string(shape.stages) + " stages, " + std::to_string(shape.micro_batches) +
                          " micro-batches and " + std::to_string(shape.chunks) + " chunks";
  if (shape.stages < 1 || shape.micro_batches < 1 || shape.chunks < 1) {
    throw ConfigError("a pipeline's schedule: got " + got + ", expected at least one of each");
  }
  if (shape.chunks > 1 && schedule != PipelineSchedule::interleaved) {
    throw ConfigError("a pipeline's schedule: got " + got + ", but only the schedule interleaved has several chunks");
  }
  if (stage < 0 || stage >= shape.stages) {
    throw ConfigError("a pipeline's schedule: got stage " + std::to_string(stage) + ", expected 0 to " +
                      std::to_string(shape.stages - 1));
  }
}

/// The sizes of groups of micro-batches that pass one chunk after the other: of at least as many as there are stages.
std::vector<int> group_sizes(const PipelineShape& shape) {
  const int groups = std::max(1, shape.micro_batches / shape.stages);
  std::vector<int> sizes;
  for (int i = 0; i < groups; ++i) {
    sizes.push_back(shape.micro_batches / groups + (i < shape.micro_batches % groups ? 1 : 0));
  }
  return sizes;
}

Instructions in_groups(const PipelineShape& shape, StageAction action) {
  Instructions order;
  int begin = 0;
  for (const int size : group_sizes(shape)) {
    for (int i = 0; i < shape.chunks; ++i) {
      const int chunk = action == StageAction::forward ? i : shape.chunks - 1 - i;
      for (int j = 0; j < size; ++j) order.push_back({action, chunk, begin + j});
    }
    begin += size;
  }
  return order;
}

/// Forwards before the first backward, where a forward and a backward take turns afterwards.
int num_ahead(PipelineSchedule schedule, const PipelineShape& shape, int stage) {
  const int after = shape.stages - 1 - stage;
  const int all = shape.micro_batches * shape.chunks;
  if (schedule == PipelineSchedule::gpipe) return all;
  if (shape.chunks == 1) return std::min(all, after);
  return std::min(all, 2 * after + (shape.chunks - 1) * group_sizes(shape).front());
}

Instructions in_turns(const PipelineShape& shape, int ahead) {
  const Instructions forwards = in_groups(shape, StageAction::forward);
  const Instructions backwards = in_groups(shape, StageAction::backward);
  Instructions order(forwards.begin(), forwards.begin() + ahead);
  auto backward = backwards.begin();
  for (auto forward = forwards.begin() + ahead; forward != forwards.end(); ++forward) {
    order.push_back(*forward);
    order.push_back(*backward++);
  }
  std::copy(backward, backwards.end(), std::back_inserter(order));
  return order;
}

/// A stage postpones as many gradients of weights as there are stages before it: all stages then have as many
/// activations alive as the first one.
Instructions with_weights_apart(const PipelineShape& shape, int stage) {
  const int all = shape.micro_batches;
  Instructions order;
  int forward = 0, weight = 0;
  while (forward < std::min(shape.stages - stage, all)) order.push_back({StageAction::forward, 0, forward++});
  for (int input = 0; input < all; ++input) {
    order.push_back({StageAction::backward_input, 0, input});
    if (input >= stage) order.push_back({StageAction::backward_weight, 0, weight++});
    if (forward < all) order.push_back({StageAction::forward, 0, forward++});
  }
  while (weight < all) order.push_back({StageAction::backward_weight, 0, weight++});
  return order;
}

Instructions with_transfers(const Instructions& order, const PipelineShape& shape, int stage) {
  Instructions whole;
  for (const StageInstruction& step : order) {
    const int part = step.chunk * shape.stages + stage;
    const bool has_before = part > 0 && shape.stages > 1;
    const bool has_after = part < shape.stages * shape.chunks - 1 && shape.stages > 1;
    const auto add = [&](bool wanted, StageAction action) {
      if (wanted) whole.push_back({action, step.chunk, step.micro_batch});
    };
    const bool is_forward = step.action == StageAction::forward;
    const bool passes_gradient = step.action == StageAction::backward || step.action == StageAction::backward_input;
    add(is_forward && has_before, StageAction::receive_activation);
    add(passes_gradient && has_after, StageAction::receive_gradient);
    whole.push_back(step);
    add(is_forward && has_after, StageAction::send_activation);
    add(passes_gradient && has_before, StageAction::send_gradient);
  }
  return whole;
}

}  // namespace

std::string text(const StageInstruction& instruction) {
  static constexpr const char* kNames[] = {"receive_activation", "forward",      "send_activation",
                                           "receive_gradient",   "backward",     "backward_input",
                                           "backward_weight",    "send_gradient"};
  std::string text = kNames[static_cast<int>(instruction.action)];
  text += " " + std::to_string(instruction.micro_batch);
  if (instruction.chunk > 0) text += " of chunk " + std::to_string(instruction.chunk);
  return text;
}

std::vector<StageInstruction> stage_instructions(PipelineSchedule schedule, const PipelineShape& shape, int stage) {
  check(schedule, shape, stage);
  const Instructions order = schedule == PipelineSchedule::zero_bubble
                                 ? with_weights_apart(shape, stage)
                                 : in_turns(shape, num_ahead(schedule, shape, stage));
  return with_transfers(order, shape, stage);
}

double published_idle_time(PipelineSchedule schedule, const PipelineShape& shape, const StageCosts& costs) {
  check(schedule, shape, 0);
  const int others = shape.stages - 1;
  if (schedule == PipelineSchedule::zero_bubble) {
    return others * (costs.forward + costs.backward_input - costs.backward_weight);
  }
  return others * (costs.forward + costs.backward_input + costs.backward_weight) / shape.chunks;
}

int published_peak_activations(PipelineSchedule schedule, const PipelineShape& shape, int stage) {
  check(schedule, shape, stage);
  if (schedule == PipelineSchedule::zero_bubble) return std::min(shape.stages, shape.micro_batches);
  return std::min(num_ahead(schedule, shape, stage) + 1, shape.micro_batches * shape.chunks);
}

}  // namespace deeptide
