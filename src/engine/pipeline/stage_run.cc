// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Does what each instruction of a schedule says.
#include "engine/pipeline/stage_run.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

namespace deeptide::engine {
namespace {

/// While it lives, each backward of a chunk counts as a micro-batch of the engine, which gives gradients their usual
/// sums. Does nothing for one chunk.
class ClosingPieces {
 public:
  ClosingPieces(Engine& engine, int chunks) : engine_(chunks > 1 ? &engine : nullptr) {
    if (engine_) engine_->set_gradient_accumulation_boundary(false);
  }
  ~ClosingPieces() {
    if (engine_ && !engine_->ended()) engine_->set_gradient_accumulation_boundary(std::nullopt);
  }
  ClosingPieces(const ClosingPieces&) = delete;
  ClosingPieces& operator=(const ClosingPieces&) = delete;

 private:
  Engine* engine_;
};

/// The tensor itself, but no leaf of autograd's nor a view of one: layers may write into it.
struct Handed : torch::autograd::Function<Handed> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& received) {
    return received.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return gradients;
  }
};

/// Makes what a stage has received safe for its first layer to write into.
Activations handed(Activations received) {
  if (!at::GradMode::is_enabled()) return received;
  for (at::Tensor& tensor : received) {
    if (tensor.defined() && tensor.requires_grad()) tensor = Handed::apply(tensor);
  }
  return received;
}

/// While it lives, gradients of parameters wait under a number.
class Holding {
 public:
  Holding(PipelineStage& stage, int64_t number) : stage_(stage) { stage_.hold(number); }
  ~Holding() { stage_.hold(std::nullopt); }
  Holding(const Holding&) = delete;

 private:
  PipelineStage& stage_;
};

}  // namespace

StageRun::StageRun(Engine& engine, PipelineStage* stage, const PipelineModule& model, const PipelineEngine::Loss& loss)
    : engine_(engine), stage_(stage), model_(model), loss_(loss), shared_(model), buffers_(model) {
  if (stage_ != nullptr) letters_.emplace(*stage_);
}

StageRun::Neighbour StageRun::neighbour(int chunk, int distance) const {
  const int other = part(chunk) + distance;
  return {other % model_.num_stages(), other / model_.num_stages()};
}

StageRun::Result StageRun::train(PipelineSchedule schedule, const std::vector<MicroBatch>& batches, int count) {
  const PipelineShape shape{model_.num_stages(), count, model_.num_chunks()};
  const auto order = stage_instructions(schedule, shape, model_.stage());
  prepare(order, true);
  engine_.begin_forward();
  const ClosingPieces pieces(engine_, model_.num_chunks());
  for (const StageInstruction& instruction : order) run(instruction, batches);
  return std::exchange(result_, {});
}

std::vector<double> StageRun::evaluate(const std::vector<MicroBatch>& batches, int count) {
  const at::NoGradGuard no_grad;
  const auto schedule = model_.num_chunks() == 1 ? PipelineSchedule::gpipe : PipelineSchedule::interleaved;
  auto order = stage_instructions(schedule, {model_.num_stages(), count, model_.num_chunks()}, model_.stage());
  std::erase_if(order, [](const StageInstruction& each) { return each.action > StageAction::send_activation; });
  prepare(order, false);
  for (const StageInstruction& instruction : order) evaluate_one(instruction, batches);
  return std::exchange(result_, {}).losses;
}

void StageRun::evaluate_one(const StageInstruction& instruction, const std::vector<MicroBatch>& batches) {
  const Piece piece{instruction.chunk, instruction.micro_batch};
  run(instruction, batches);
  if (instruction.action == StageAction::forward) {
    inputs_.erase(piece);
    if (is_last(piece.first)) result_.losses.push_back(outputs_.extract(piece).mapped().front().item<double>());
  } else if (instruction.action == StageAction::send_activation) {
    outputs_.erase(piece);
    // An output lies here until its stage has taken it.
    if (piece.second % model_.num_stages() == model_.num_stages() - 1) stage_->flush();
  }
}

void StageRun::prepare(const std::vector<StageInstruction>& order, bool training) {
  ++number_;
  result_ = {};
  for (auto* held : {&inputs_, &outputs_, &gradients_}) held->clear();  // of a step that failed
  left_.clear();
  closing_.clear();
  is_apart_ = std::ranges::any_of(
      order, [](const StageInstruction& each) { return each.action == StageAction::backward_weight; });
  part_weights();
  std::optional<Piece> last_trained;
  std::map<int, int64_t> due = shared_.letters(training);
  for (const StageInstruction& each : order) {
    const Piece piece{each.chunk, each.micro_batch};
    if (each.action == StageAction::receive_activation) ++due[neighbour(each.chunk, -1).stage];
    if (each.action == StageAction::receive_gradient) ++due[neighbour(each.chunk, 1).stage];
    if (each.action != StageAction::backward && each.action != StageAction::backward_weight) continue;
    final_ = piece;
    // Others have no gradients to reduce.
    if (!model_.trains(each.chunk)) continue;
    closing_.insert(piece);
    last_trained = piece;
  }
  if (last_trained) {  // what would close last closes with the step
    closing_.erase(*last_trained);
    closing_.insert(final_);
  }
  if (!letters_) return;
  letters_->begin(due, model_.num_chunks() > 1);
  shared_.exchange_values(*letters_, number_);
}

void StageRun::part_weights() {
  aside_ = is_apart_ && model_.stage() > 0 ? std::make_shared<WeightsAside>() : nullptr;
  if (!aside_) return;
  Activations weights = model_.parameters();
  for (const PipelineModule::Tie& tie : model_.ties()) {
    const Activations of_tie = tie.module->parameters();
    weights.insert(weights.end(), of_tie.begin(), of_tie.end());
  }
  aside_->set_weights(weights);
}

void StageRun::run(const StageInstruction& instruction, const std::vector<MicroBatch>& batches) {
  const Piece piece{instruction.chunk, instruction.micro_batch};
  switch (instruction.action) {
    case StageAction::receive_activation:
      return receive_activation(piece);
    case StageAction::forward: {
      const WeightsAside::Recording recording(aside_);
      Activations outputs = output_of(piece, batches);
      if (is_last(piece.first)) outputs = {loss_of(outputs, batches.at(piece.second))};
      outputs_[piece] = std::move(outputs);
      return;
    }
    case StageAction::send_activation:
      return send_activation(piece);
    case StageAction::receive_gradient:
      return receive_gradient(piece);
    case StageAction::backward:
      return backward(piece);
    case StageAction::send_gradient:
      return send_gradient(piece);
    case StageAction::backward_input:
      return backward_input(piece);
    case StageAction::backward_weight:
      return backward_weight(piece);
  }
}

void StageRun::receive_activation(const Piece& piece) {
  inputs_[piece] =
      letters_->receive({LetterKind::activation, piece.first, piece.second, number_}, neighbour(piece.first, -1).stage);
}

Activations StageRun::output_of(const Piece& piece, const std::vector<MicroBatch>& batches) {
  buffers_.keep();
  Activations outputs = part(piece.first) == 0 ? model_.forward(batches.at(piece.second).inputs, piece.first)
                                               : model_.forward(handed(inputs_.at(piece)), piece.first);
  buffers_.check();
  return outputs;
}

at::Tensor StageRun::loss_of(const Activations& outputs, const MicroBatch& batch) {
  at::Tensor loss = loss_(outputs, batch.targets);
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "the loss of a micro-batch: got ",
                    loss.defined() ? c10::str("shape ", loss.sizes()) : "nothing", ", expected a scalar tensor");
  return loss.clone();  // the model may add later losses to its own tensor
}

void StageRun::send_activation(const Piece& piece) {
  const Neighbour to = neighbour(piece.first, 1);
  letters_->send({LetterKind::activation, to.chunk, piece.second, number_}, outputs_.at(piece), to.stage);
}

void StageRun::receive_gradient(const Piece& piece) {
  gradients_[piece] =
      letters_->receive({LetterKind::gradient, piece.first, piece.second, number_}, neighbour(piece.first, 1).stage);
}

void StageRun::backward(const Piece& piece) {
  differentiate(piece);
  if (part(piece.first) == 0) end(piece);
}

/// The gradient that the stage before waits for. All those of parameters wait until they are complete.
void StageRun::backward_input(const Piece& piece) {
  if (!aside_) return differentiate(piece);
  aside_->part(outputs_.at(piece));
  const Holding holding(*stage_, piece.second);
  differentiate(piece);
  left_[piece] = aside_->take();
}

void StageRun::backward_weight(const Piece& piece) {
  if (aside_) {
    auto [from, with] = left_.extract(piece).mapped();
    if (piece == final_) add_shared_gradients(from, with);
    stage_->give(piece.second);
    if (!from.empty()) stage_->backward(from, with);
    stage_->take_joining();
    shared_.add_gradients();
  }
  end(piece);
}

void StageRun::differentiate(const Piece& piece) {
  const Activations outputs = outputs_.extract(piece).mapped();
  if (piece == final_ && model_.num_chunks() > 1) engine_.set_gradient_accumulation_boundary(true);
  if (is_last(piece.first)) {
    result_.losses.push_back(outputs.front().item<double>());
    engine_.backward(outputs.front());
  } else {
    backward_from(piece, outputs);
  }
  shared_.add_gradients();
}

void StageRun::backward_from(const Piece& piece, const Activations& outputs) {
  const Activations gradients = gradients_.extract(piece).mapped();
  Activations from, with;
  auto gradient = gradients.begin();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    if (gradient->defined()) {
      from.push_back(output);
      with.push_back(*gradient);
    }
    ++gradient;
  }
  if (piece == final_ && !aside_) add_shared_gradients(from, with);
  if (!from.empty()) stage_->backward(from, with);
  stage_->take_joining();
}

void StageRun::add_shared_gradients(Activations& from, Activations& with) {
  const auto [parameters, sums] = shared_.take_gradients(*letters_, number_);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (stage_->join(parameters[i], sums[i])) continue;
    from.push_back(parameters[i]);
    with.push_back(sums[i].to(parameters[i].scalar_type()));
  }
}

void StageRun::send_gradient(const Piece& piece) {
  const Activations inputs = inputs_.extract(piece).mapped();
  Activations gradients;
  for (const at::Tensor& input : inputs) {
    if (input.requires_grad()) gradients.push_back(input.grad());
  }
  const Neighbour to = neighbour(piece.first, -1);
  letters_->send({LetterKind::gradient, to.chunk, piece.second, number_}, gradients, to.stage);
  if (!is_apart_) end(piece);
}

/// After a backward, when its gradient is on its way, and the gradients of its weights are there.
void StageRun::end(const Piece& piece) {
  if (piece == final_ && letters_) shared_.send_gradients(*letters_, number_);
  if (!closing_.contains(piece)) return;
  if (stage_ != nullptr) stage_->note_backward();
  result_.outcome = engine_.step();
}

}  // namespace deeptide::engine
