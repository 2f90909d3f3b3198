// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands calls on to the engine's channels; a wait for a neighbour serves the stage's own ranks.
#include "deeptide/pipeline_stage.h"

#include <functional>
#include <span>

#include "base/libraries/format.h"
#include "engine/bind/stages.h"
#include "engine/design/nearest_divisors.h"
#include "engine/design/topology.h"
#include "engine/engine_impl.h"

namespace deeptide {

std::shared_ptr<const engine::Axes> pipeline_axes(int stages, int ranks) {
  if (stages < 1 || ranks < 1 || ranks % stages != 0) {
    throw ConfigError(
        format_text("a pipeline of {} stages over {} ranks: got a number of ranks that is no multiple of "
                    "the stages; with {} ranks take {} stages",
                    stages, ranks, ranks, engine::nearest_divisors(stages, ranks)));
  }
  engine::Axes axes;
  axes.sizes[static_cast<size_t>(world::Axis::pipe)] = stages;
  axes.sizes[static_cast<size_t>(world::Axis::data)] = ranks / stages;
  return std::make_shared<const engine::Axes>(axes);
}

PipelineStage::PipelineStage(Engine& engine) : engine_(*engine.impl_) {
  TORCH_CHECK_VALUE(engine_.channels.stages() != nullptr,
                    "PipelineStage: the engine has no stages; give initialize pipeline_axes(stages, ranks)");
}

int PipelineStage::index() const { return engine_.channels.stages()->index(); }
int PipelineStage::num_stages() const { return engine_.channels.stages()->size(); }
at::Device PipelineStage::device() const { return engine_.model.device(); }
int PipelineStage::data_rank() const {
  return engine_.channels.data().index() / engine_.channels.mesh().size(world::Axis::tensor);
}
int PipelineStage::data_size() const { return engine_.channels.topology().num_batches(); }

void PipelineStage::send(const at::Tensor& tensor, int stage) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), "send: got a tensor on ", tensor.device(), ", expected one on the CPU");
  engine_.told("send", [&] { engine_.channels.stages()->mail().send_known(tensor, stage); });
}

int64_t PipelineStage::expect(const at::Tensor& tensor, int stage) {
  return engine_.told("receive", [&] { return engine_.channels.stages()->expect(tensor, stage); });
}

/// Serves the ranks of the stage, for whom another stage may wait.
std::function<void()> PipelineStage::serving() {
  if (engine_.channels.data().size() == 1) return nullptr;
  return [this] {
    engine_.residency->attend();
    if (engine_.reducer) engine_.reducer->go_on();
  };
}

at::Tensor PipelineStage::receive(int64_t letter) {
  return engine_.told("receive", [&] {
    return engine_.channels.stages()->take(letter, {"pipeline", "waiting for another stage"}, serving());
  });
}

void PipelineStage::flush() {
  engine_.told("send", [&] {
    const comm::Site site = {"pipeline", "waiting until another stage has taken what was sent"};
    engine_.channels.stages()->mail().flush(site, serving());
  });
}

void PipelineStage::backward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients) {
  engine_.told("backward", [&] {
    engine_.explain_memory("backward()", [&] { engine_.stepper->backward_from(outputs, gradients); });
  });
}

void PipelineStage::hold(std::optional<int64_t> number) {
  if (engine_.intake) engine_.intake->hold(number);
}

void PipelineStage::give(int64_t number) {
  engine_.told("backward", [&] {
    if (engine_.intake) engine_.intake->give(number);
  });
}

bool PipelineStage::add_product(const at::Tensor& weight, const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK_VALUE(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0),
                    "add_product: got factors of shapes ", left.sizes(), " and ", right.sizes(),
                    ", expected (N, K) and (K, M)");
  if (!engine_.intake) return false;
  return engine_.told("backward", [&] {
    bool taken = false;
    engine_.explain_memory("backward()", [&] { taken = engine_.intake->take_product(weight, {left, right}); });
    return taken;
  });
}

bool PipelineStage::join(const at::Tensor& parameter, const at::Tensor& sum) {
  TORCH_CHECK_VALUE(parameter.sizes() == sum.sizes(), "join: got a sum of shape ", sum.sizes(),
                    " for a parameter of shape ", parameter.sizes(), ", expected the same");
  return engine_.intake && engine_.told("backward", [&] { return engine_.intake->join(parameter, sum); });
}

void PipelineStage::take_joining() {
  engine_.told("backward", [&] {
    if (engine_.intake) engine_.intake->take_joining();
  });
}

void PipelineStage::note_backward() { engine_.channels.stages()->note_backward(); }

void PipelineStage::lose_step(const std::string& why) { engine_.channels.board()->report_lost_step(why); }
void PipelineStage::begin_step() { engine_.channels.board()->withdraw_lost_step(); }

void PipelineStage::meet() {
  engine_.told("meet", [&] { engine_.mean(0.0); });
}

std::vector<double> PipelineStage::exchange(const std::vector<double>& values, const std::string& what) {
  return engine_.told("train_batch", [&] {
    const comm::Site site = {"pipeline", what};
    return engine_.channels.stages()->exchange_all(std::span<const double>(values), site);
  });
}

}  // namespace deeptide
