// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A node of autograd that keeps a segment's inputs, and computes the segment once more in backward.
#include "deeptide/recompute.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/pipeline/weights_aside.h"

namespace deeptide {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Forward = std::function<Tensors(const Tensors&)>;
using engine::WeightsAside;

at::Generator generator_of(c10::Device device) { return at::globalContext().defaultGenerator(device); }

/// A device's default generator as it was.
class Draws {
 public:
  explicit Draws(c10::Device device) : device_(device), before_(generator_of(device).get_state()) {}

  /// Forgets the state where nothing was drawn since: putting it back would disturb who draws meanwhile.
  void end() {
    if (before_.equal(generator_of(device_).get_state())) before_ = Tensor();
  }
  /// Exchanges the generator's state for this one's.
  void swap() {
    if (!before_.defined()) return;
    at::Generator generator = generator_of(device_);
    Tensor now = generator.get_state();
    generator.set_state(before_);
    before_ = std::move(now);
  }

 private:
  c10::Device device_;
  Tensor before_;
};

/// Autocast of one device type, as the constructing thread has it.
struct Casts {
  explicit Casts(c10::DeviceType type)
      : type(type),
        enabled(at::autocast::is_autocast_enabled(type)),
        dtype(at::autocast::get_autocast_dtype(type)),
        cache(at::autocast::is_autocast_cache_enabled()) {}

  void set() const {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
  }

  c10::DeviceType type;
  bool enabled;
  c10::ScalarType dtype;
  bool cache;
};

class Segment : public torch::CustomClassHolder {
 public:
  Segment(Forward forward, const Tensors& inputs) : forward_(std::move(forward)) {
    std::vector<c10::Device> devices = {at::kCPU};
    const auto elsewhere =
        std::ranges::find_if(inputs, [](const Tensor& one) { return one.defined() && !one.is_cpu(); });
    if (elsewhere != inputs.end()) devices.push_back(elsewhere->device());
    for (const c10::Device device : devices) {
      draws_.emplace_back(device);
      casts_.emplace_back(device.type());
    }
  }

  Tensors first(const Tensors& inputs) {
    Tensors outputs = forward_(inputs);
    for (Draws& draws : draws_) draws.end();
    return outputs;
  }

  /// Draws and casts as first() did; whatever happens, the thread goes on as it was.
  Tensors again(const Tensors& inputs) {
    struct Back {
      explicit Back(Segment& segment) : segment(segment) {
        for (const Casts& casts : segment.casts_) before.emplace_back(casts.type);
        for (const Casts& casts : segment.casts_) casts.set();
        for (Draws& draws : segment.draws_) draws.swap();
        at::autocast::increment_nesting();
      }
      ~Back() {
        if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        for (Draws& draws : segment.draws_) draws.swap();
        for (const Casts& casts : before) casts.set();
      }
      Segment& segment;
      WeightsAside::Recording recording{segment.aside_};
      std::vector<Casts> before;
    };
    const Back back(*this);
    return forward_(inputs);
  }

  /// Runs backward of what again() returned.
  void backward(const Tensors& outputs, const Tensors& gradients) const {
    if (aside_) aside_->part(outputs);
    torch::autograd::backward(outputs, gradients);
  }

 private:
  Forward forward_;
  std::shared_ptr<WeightsAside> aside_ = WeightsAside::recording();  // of a stage that computes those gradients later
  std::vector<Draws> draws_;
  std::vector<Casts> casts_;
};

struct Recomputed : torch::autograd::Function<Recomputed> {
  // The anchor has a gradient, so the node is there where no input has one.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& /*anchor*/,
                                                const c10::intrusive_ptr<Segment>& segment, at::TensorList inputs) {
    context->set_materialize_grads(false);
    context->save_for_backward(inputs.vec());
    context->saved_data["segment"] = c10::IValue::make_capsule(segment);
    Tensors outputs = segment->first(inputs.vec());
    context->saved_data["outputs"] = std::ssize(outputs);
    return outputs;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "recompute: a segment has no second derivative: leave out create_graph");
    const auto segment = c10::static_intrusive_pointer_cast<Segment>(context->saved_data["segment"].toCapsule());
    Tensors inputs;
    for (const Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.defined() ? saved.detach().set_requires_grad(saved.requires_grad()) : saved);
    }
    Tensors outputs;
    {
      const at::AutoGradMode with_graph(true);
      outputs = segment->again(inputs);
    }
    TORCH_CHECK(std::ssize(outputs) == context->saved_data["outputs"].toInt(), "recompute: forward returned ",
                outputs.size(), " tensors in backward, and ", context->saved_data["outputs"].toInt(),
                " before: let it depend on its inputs alone");
    Tensors roots, of_roots;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      of_roots.push_back(gradients[i]);
    }
    if (!roots.empty()) segment->backward(roots, of_roots);
    Tensors of_inputs(2);  // the anchor's and the segment's
    for (const Tensor& input : inputs) of_inputs.push_back(input.defined() ? input.grad() : input);
    return of_inputs;
  }
};

}  // namespace

std::vector<Tensor> recompute(Forward forward, const std::vector<Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return forward(inputs);
  const Tensor anchor = at::empty({0}).set_requires_grad(true);
  return Recomputed::apply(anchor, c10::make_intrusive<Segment>(std::move(forward), inputs), at::TensorList(inputs));
}

}  // namespace deeptide
