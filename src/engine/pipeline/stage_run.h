// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One stage's part of a step: receives, computes and sends as the schedule's list says.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "deeptide/pipeline_schedule.h"
#include "engine/pipeline/letters.h"
#include "engine/pipeline/shared_buffers.h"
#include "engine/pipeline/shared_weights.h"
#include "engine/pipeline/weights_aside.h"

namespace deeptide::engine {

/// Runs steps of one stage. The model's parts, in order, are chunk 0 of each stage, chunk 1 of each, and so on.
class StageRun {
 public:
  /// All outlive it. `stage`: null where the pipeline has one stage alone.
  StageRun(Engine& engine, PipelineStage* stage, const PipelineModule& model, const PipelineEngine::Loss& loss);

  struct Result {
    std::vector<double> losses;  // of the last stage; none on the others
    StepOutcome outcome;
  };
  /// Runs one optimizer step of `count` micro-batches; `batches` are read on the first and the last stage.
  Result train(PipelineSchedule schedule, const std::vector<MicroBatch>& batches, int count);
  /// Runs forwards alone.
  std::vector<double> evaluate(const std::vector<MicroBatch>& batches, int count);

 private:
  using Piece = std::pair<int, int>;  // a micro-batch in a chunk of this stage: (chunk, micro-batch)
  struct Neighbour {
    int stage = 0, chunk = 0;
  };

  void prepare(const std::vector<StageInstruction>& order, bool training);
  void part_weights();
  void run(const StageInstruction& instruction, const std::vector<MicroBatch>& batches);
  void evaluate_one(const StageInstruction& instruction, const std::vector<MicroBatch>& batches);
  int part(int chunk) const { return chunk * model_.num_stages() + model_.stage(); }
  bool is_last(int chunk) const { return part(chunk) == model_.num_stages() * model_.num_chunks() - 1; }
  Neighbour neighbour(int chunk, int distance) const;

  void receive_activation(const Piece& piece);
  Activations output_of(const Piece& piece, const std::vector<MicroBatch>& batches);
  at::Tensor loss_of(const Activations& outputs, const MicroBatch& batch);
  void send_activation(const Piece& piece);
  void receive_gradient(const Piece& piece);
  void backward(const Piece& piece);
  void backward_input(const Piece& piece);
  void backward_weight(const Piece& piece);
  void differentiate(const Piece& piece);
  void add_shared_gradients(Activations& from, Activations& with);
  void backward_from(const Piece& piece, const Activations& outputs);
  void send_gradient(const Piece& piece);
  void end(const Piece& piece);

  Engine& engine_;
  PipelineStage* stage_;
  const PipelineModule& model_;
  const PipelineEngine::Loss& loss_;
  std::optional<Letters> letters_;
  SharedWeights shared_;
  SharedBuffers buffers_;
  int64_t number_ = 0;  // of steps and evaluations so far
  Piece final_;         // of the last backward
  std::set<Piece> closing_;
  Result result_;
  std::map<Piece, Activations> inputs_, outputs_, gradients_;
  bool is_apart_ = false;  // gradients of weights
  // Null if they are not, and on the first stage, where nobody waits for the others.
  std::shared_ptr<WeightsAside> aside_;
  std::map<Piece, std::pair<Activations, Activations>> left_;
};

}  // namespace deeptide::engine
