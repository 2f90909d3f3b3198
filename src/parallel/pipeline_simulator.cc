// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets each stage go on until it waits for a message, and checks what it does on the way.
#include <algorithm>
#include <numeric>
#include <optional>

#include "deeptide/pipeline_schedule.h"

namespace deeptide {
namespace {

/// The progress of one micro-batch in one part of the model.
struct Progress {
  std::optional<double> activation_at, gradient_at;  // arrival
  bool has_activation = false, has_gradient = false;
  bool forward = false, backward_input = false, backward_weight = false;
};

struct Stage {
  size_t next = 0;
  double now = 0.0, busy = 0.0;
  int alive = 0, peak = 0;
};

class Simulation {
 public:
  Simulation(const std::vector<std::vector<StageInstruction>>& instructions, const PipelineShape& shape,
             const StageCosts& costs)
      : instructions_(instructions),
        shape_(shape),
        costs_(costs),
        stages_(instructions.size()),
        progress_(static_cast<size_t>(shape.stages) * static_cast<size_t>(shape.chunks) *
                  static_cast<size_t>(shape.micro_batches)) {}

  SimulatedStep run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < shape_.stages; ++stage) moved |= advance(stage);
    }
    check_end();
    SimulatedStep step;
    for (const Stage& stage : stages_) step.time = std::max(step.time, stage.now);
    for (const Stage& stage : stages_) {
      step.idle.push_back(step.time - stage.busy);
      step.peak_activations.push_back(stage.peak);
    }
    return step;
  }

 private:
  Progress& progress(int part, int micro_batch) {
    return progress_[static_cast<size_t>(part) * static_cast<size_t>(shape_.micro_batches) +
                     static_cast<size_t>(micro_batch)];
  }

  /// Whether the stage did anything.
  bool advance(int index) {
    Stage& stage = stages_[static_cast<size_t>(index)];
    const auto& list = instructions_[static_cast<size_t>(index)];
    const size_t begin = stage.next;
    while (stage.next < list.size() && execute(index, list[stage.next])) ++stage.next;
    return stage.next > begin;
  }

  [[noreturn]] void refuse(int stage, const StageInstruction& step, const std::string& what) const {
    throw ConfigError("a pipeline's schedule: stage " + std::to_string(stage) + ": " + text(step) + " " + what);
  }

  /// False: it waits for a message.
  bool execute(int index, const StageInstruction& step) {
    if (step.chunk < 0 || step.chunk >= shape_.chunks || step.micro_batch < 0 ||
        step.micro_batch >= shape_.micro_batches) {
      refuse(index, step, "is outside the pipeline's shape");
    }
    switch (step.action) {
      case StageAction::receive_activation:
      case StageAction::receive_gradient:
        return receive(index, step);
      case StageAction::send_activation:
      case StageAction::send_gradient:
        send(index, step);
        return true;
      case StageAction::forward:
        forward(index, step);
        return true;
      default:
        backward(index, step);
        return true;
    }
  }

  int part_of(int index, const StageInstruction& step) const { return step.chunk * shape_.stages + index; }
  int last_part() const { return shape_.stages * shape_.chunks - 1; }

  bool receive(int index, const StageInstruction& step) {
    Progress& mine = progress(part_of(index, step), step.micro_batch);
    const bool forwards = step.action == StageAction::receive_activation;
    bool& has = forwards ? mine.has_activation : mine.has_gradient;
    const std::optional<double>& at = forwards ? mine.activation_at : mine.gradient_at;
    if (has) refuse(index, step, "occurs twice");
    if (!at) return false;
    has = true;
    Stage& stage = stages_[static_cast<size_t>(index)];
    stage.now = std::max(stage.now, *at);
    return true;
  }

  void send(int index, const StageInstruction& step) {
    const bool forwards = step.action == StageAction::send_activation;
    const int part = part_of(index, step);
    const int to = part + (forwards ? 1 : -1);
    if (to < 0 || to > last_part()) refuse(index, step, "has no receiver");
    const Progress& mine = progress(part, step.micro_batch);
    if (!(forwards ? mine.forward : mine.backward_input)) refuse(index, step, "comes before what it sends");
    Progress& theirs = progress(to, step.micro_batch);
    std::optional<double>& at = forwards ? theirs.activation_at : theirs.gradient_at;
    if (at) refuse(index, step, "occurs twice");
    at = stages_[static_cast<size_t>(index)].now + costs_.transfer;
  }

  void compute(int index, double cost) {
    Stage& stage = stages_[static_cast<size_t>(index)];
    stage.now += cost / shape_.chunks;
    stage.busy += cost / shape_.chunks;
  }

  void once(bool& done, int index, const StageInstruction& step) const {
    if (done) refuse(index, step, "occurs twice");
    done = true;
  }

  void forward(int index, const StageInstruction& step) {
    const int part = part_of(index, step);
    Progress& mine = progress(part, step.micro_batch);
    const bool local = shape_.stages == 1;  // the part before is on this stage too
    if (part > 0 && !(local ? progress(part - 1, step.micro_batch).forward : mine.has_activation)) {
      refuse(index, step, "lacks its activation");
    }
    once(mine.forward, index, step);
    compute(index, costs_.forward);
    Stage& stage = stages_[static_cast<size_t>(index)];
    stage.peak = std::max(stage.peak, ++stage.alive);
  }

  void backward(int index, const StageInstruction& step) {
    const int part = part_of(index, step);
    Progress& mine = progress(part, step.micro_batch);
    const bool of_weights = step.action != StageAction::backward_input;
    if (step.action == StageAction::backward_weight) {
      if (!mine.backward_input) refuse(index, step, "comes before backward_input");
    } else {
      const bool local = shape_.stages == 1;
      if (!mine.forward) refuse(index, step, "comes before its forward");
      if (part < last_part() && !(local ? progress(part + 1, step.micro_batch).backward_input : mine.has_gradient)) {
        refuse(index, step, "lacks its gradient");
      }
      once(mine.backward_input, index, step);
      compute(index, costs_.backward_input);
    }
    if (!of_weights) return;
    once(mine.backward_weight, index, step);
    compute(index, costs_.backward_weight);
    --stages_[static_cast<size_t>(index)].alive;
  }

  /// Every stage has done its list, and the lists have done the step.
  void check_end() const {
    std::string waiting;
    for (size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i].next == instructions_[i].size()) continue;
      waiting += (waiting.empty() ? "" : ", ") + std::string("stage ") + std::to_string(i) + " at " +
                 text(instructions_[i][stages_[i].next]);
    }
    if (!waiting.empty()) throw ConfigError("a pipeline's schedule deadlocks: " + waiting + " wait for a message");
    for (size_t i = 0; i < progress_.size(); ++i) {
      if (progress_[i].backward_weight) continue;
      const int micro_batches = shape_.micro_batches;
      throw ConfigError("a pipeline's schedule: no backward of micro-batch " +
                        std::to_string(static_cast<int>(i) % micro_batches) + " in part " +
                        std::to_string(static_cast<int>(i) / micro_batches) + " of the model");
    }
  }

  const std::vector<std::vector<StageInstruction>>& instructions_;
  const PipelineShape shape_;
  const StageCosts costs_;
  std::vector<Stage> stages_;
  std::vector<Progress> progress_;  // by part, then micro-batch
};

}  // namespace

double SimulatedStep::bubble() const {
  const double all = std::accumulate(idle.begin(), idle.end(), 0.0);
  return time > 0.0 ? all / (time * static_cast<double>(idle.size())) : 0.0;
}

SimulatedStep simulate(const std::vector<std::vector<StageInstruction>>& instructions, const PipelineShape& shape,
                       const StageCosts& costs) {
  if (shape.stages < 1 || shape.micro_batches < 1 || shape.chunks < 1 ||
      instructions.size() != static_cast<size_t>(shape.stages)) {
    throw ConfigError("a pipeline's schedule: got lists for " + std::to_string(instructions.size()) +
                      " stages, expected " + std::to_string(shape.stages) + ", and at least one micro-batch and chunk");
  }
  return Simulation(instructions, shape, costs).run();
}

SimulatedStep simulate(PipelineSchedule schedule, const PipelineShape& shape, const StageCosts& costs) {
  std::vector<std::vector<StageInstruction>> instructions;
  for (int stage = 0; stage < std::max(shape.stages, 1); ++stage) {
    instructions.push_back(stage_instructions(schedule, shape, stage));
  }
  return simulate(instructions, shape, costs);
}

}  // namespace deeptide
