// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Schedules of a pipeline as lists of instructions, and a simulator that runs them on paper.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

/// gpipe: all forwards, then all backwards (arXiv:1811.06965). one_f_one_b: one forward and one backward in turn
/// (arXiv:1806.03377). interleaved: the same with several chunks of the model on each stage (arXiv:2104.04473).
/// zero_bubble: ZB-H1, where gradients of weights are computed while a stage would wait (arXiv:2401.10241).
enum class PipelineSchedule : uint8_t { gpipe, one_f_one_b, interleaved, zero_bubble };

/// backward: gradients of inputs and of weights; backward_input and backward_weight: each by itself.
enum class StageAction : uint8_t {
  receive_activation,
  forward,
  send_activation,
  receive_gradient,
  backward,
  backward_input,
  backward_weight,
  send_gradient
};

/// One thing that a stage does. Value type.
struct StageInstruction {
  StageAction action = StageAction::forward;
  int chunk = 0;        // of the stage: it holds the model's part chunk * stages + stage
  int micro_batch = 0;  // whose activations or gradients are meant
  bool operator==(const StageInstruction&) const = default;
};
/// "forward 3"; "forward 3 of chunk 1" on chunks after the first.
DEEPTIDE_API std::string text(const StageInstruction& instruction);

struct PipelineShape {
  int stages = 1;
  int micro_batches = 1;
  int chunks = 1;  // of the model on each stage; more than one: interleaved only
};

/// Returns what `stage` does in one step, in order. Sends do not block; a receive waits for its message. Errors:
/// ConfigError if the shape has a number below 1, the stage is not in it, or the schedule has no chunks.
DEEPTIDE_API std::vector<StageInstruction> stage_instructions(PipelineSchedule schedule, const PipelineShape& shape,
                                                              int stage);

/// Units: any one of time. Of a whole stage and one micro-batch; a chunk takes its share.
struct StageCosts {
  double forward = 1.0;
  double backward_input = 1.0;
  double backward_weight = 1.0;
  double transfer = 0.0;  // from a send to its message's arrival, beside computing
};

/// One step on paper.
struct DEEPTIDE_API SimulatedStep {
  double time = 0.0;         // until the last stage is done
  std::vector<double> idle;  // of each stage, within `time`
  /// By stage: most activations alive at once, counted in chunks of micro-batches: from a forward until its
  /// backward, or until its backward of weights.
  std::vector<int> peak_activations;
  /// The share of all stages' time in which they wait.
  double bubble() const;
};

/// Runs `instructions`, one list per stage, as stages would. Errors: ConfigError naming stages and what they wait for
/// if they deadlock; naming the instruction if one lacks its input, occurs twice, or is missing.
DEEPTIDE_API SimulatedStep simulate(const std::vector<std::vector<StageInstruction>>& instructions,
                                    const PipelineShape& shape, const StageCosts& costs = {});
/// The same for a schedule. Errors: as stage_instructions.
DEEPTIDE_API SimulatedStep simulate(PipelineSchedule schedule, const PipelineShape& shape,
                                    const StageCosts& costs = {});

/// The published idle time of a stage, without transfers: (stages - 1) * (forward + backward); of interleaved, a
/// chunk's share of it; of zero_bubble, (stages - 1) * (forward + backward_input - backward_weight). A bound from below
/// where stages do not divide micro-batches (interleaved), are more than them or have unequal costs (zero_bubble).
DEEPTIDE_API double published_idle_time(PipelineSchedule schedule, const PipelineShape& shape,
                                        const StageCosts& costs = {});
/// The peak_activations of a stage by formula.
DEEPTIDE_API int published_peak_activations(PipelineSchedule schedule, const PipelineShape& shape, int stage);

}  // namespace deeptide
