// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A torch::optim::Optimizer as the caller's own: lent parts for each step, its states by way of torch's archives.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>
#include <torch/optim.h>
#include <torch/serialize/archive.h>

#include <map>
#include <sstream>
#include <typeinfo>

#include "deeptide/engine.h"

namespace deeptide {
namespace {

using at::Tensor;
using torch::optim::Optimizer;

constexpr std::string_view kNumber = ":number";  // ends the name of a state that is no tensor

template <typename... Kinds>
bool is_one_of(const Optimizer& optimizer) {
  return (... || (dynamic_cast<const Kinds*>(&optimizer) != nullptr));
}

class TorchOptimizer final : public CustomOptimizer {
 public:
  /// `groups`: their places among the optimizer's, by the engine's number. `parameters`: the model's, by name.
  TorchOptimizer(std::shared_ptr<Optimizer> optimizer, std::vector<size_t> groups,
                 std::map<std::string, Tensor> parameters, bool elementwise)
      : optimizer_(std::move(optimizer)), groups_(std::move(groups)), parameters_(std::move(parameters)) {
    const Optimizer& stepped = *optimizer_;
    const std::string name = c10::demangle(typeid(stepped).name());
    OptimizerInfo info{name, {name}, {{"lr", "lr", "lr"}}};
    info.hyperparameters.front().lowest = 0.0;
    info_ = &kept_optimizer_info(info);
    using namespace torch::optim;
    const bool known = is_one_of<Adagrad, Adam, AdamW, RMSprop, SGD>(*optimizer_);
    if (!known && !elementwise) needs_whole_ = "it is not known to step each element by itself";
  }

  const OptimizerInfo& info() const override { return *info_; }
  std::string needs_whole() const override { return needs_whole_; }

  void adopt(std::vector<ParameterPart> parts) override {
    parts_ = std::move(parts);
    for (ParameterPart& part : parts_) part.values = part.values.detach();
    for (auto& group : optimizer_->param_groups()) lent_.push_back(group.params());
    for (auto& parameters : lent_) parameters.clear();
    for (const ParameterPart& part : parts_) lent_.at(groups_.at(part.group)).push_back(part.values);
    if (!optimizer_->state().empty()) prototype_ = optimizer_->state().begin()->second->clone();
    for (size_t i = 0; i < parts_.size(); ++i) take_over(i);
    for (const auto& [name, parameter] : parameters_) optimizer_->state().erase(parameter.unsafeGetTensorImpl());
    parameters_.clear();
  }

  void read_groups(std::vector<Hyperparameters>& groups) override {
    for (size_t g = 0; g < groups_.size(); ++g) groups.at(g).set("lr", options(g).get_lr());
  }

  void step(const std::vector<Tensor>& gradients, const std::vector<Hyperparameters>& groups) override {
    for (size_t g = 0; g < groups_.size(); ++g) options(g).set_lr(groups.at(g).lr());
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i].values.mutable_grad() = gradients.at(i);
    lend(lent_, [&] { optimizer_->step(); });
    for (const ParameterPart& part : parts_) part.values.mutable_grad() = Tensor();
  }

  std::vector<PartState> state(size_t part) override { return states_of(parts_.at(part).values); }

  void set_state(size_t part, std::vector<PartState> state) override {
    const Tensor& values = parts_.at(part).values;
    void* key = values.unsafeGetTensorImpl();
    optimizer_->state().erase(key);
    if (state.empty()) return;
    torch::serialize::OutputArchive written;
    for (PartState& entry : state) {
      const bool is_number = entry.name.ends_with(kNumber);
      const std::string name = is_number ? entry.name.substr(0, entry.name.size() - kNumber.size()) : entry.name;
      if (is_number) {
        written.write(name, c10::IValue(entry.value.item()));
      } else {
        written.write(name, entry.per_element ? entry.value.view(values.sizes()).to(values.device()) : entry.value);
      }
    }
    std::stringstream bytes;
    written.save_to(bytes);
    torch::serialize::InputArchive archive;
    archive.load_from(bytes, values.device());
    auto made = empty_state();
    made->serialize(archive);
    optimizer_->state()[key] = std::move(made);
  }

 private:
  /// Gives a part its share of the state that the optimizer has of the whole parameter.
  void take_over(size_t number) {
    const ParameterPart& part = parts_[number];
    auto states = states_of(parameters_.at(part.parameter));
    for (PartState& state : states) {
      if (!state.per_element) continue;
      state.value = state.value.reshape({-1}).narrow(0, part.begin, part.values.numel()).clone();
    }
    set_state(number, std::move(states));
  }

  /// The states that the optimizer keeps of a tensor.
  std::vector<PartState> states_of(const Tensor& values) const {
    const auto found = optimizer_->state().find(values.unsafeGetTensorImpl());
    if (found == optimizer_->state().end()) return {};
    torch::serialize::OutputArchive written;
    found->second->serialize(written);
    std::stringstream bytes;
    written.save_to(bytes);
    torch::serialize::InputArchive archive;
    archive.load_from(bytes);
    std::vector<PartState> states;
    for (const std::string& name : archive.keys()) {
      c10::IValue value;
      archive.read(name, value);
      TORCH_CHECK_VALUE(value.isTensor() || value.isInt() || value.isDouble() || value.isBool(), info_->name,
                        ": its state '", name, "' is neither a tensor nor a number, so no checkpoint can hold it");
      const bool is_tensor = value.isTensor();
      const Tensor tensor = is_tensor ? value.toTensor() : at::scalar_tensor(value.toScalar(), type_of(value));
      const bool per_element = is_tensor && tensor.sizes() == values.sizes();
      states.push_back({is_tensor ? name : name + std::string(kNumber), tensor, per_element});
    }
    return states;
  }

  static at::ScalarType type_of(const c10::IValue& number) {
    return number.isInt() ? at::kLong : number.isBool() ? at::kBool : at::kDouble;
  }

  torch::optim::OptimizerOptions& options(size_t group) const {
    return optimizer_->param_groups().at(groups_[group]).options();
  }

  /// Runs `work` while the groups hold other parameters.
  template <typename Work>
  void lend(std::vector<std::vector<Tensor>>& others, Work work) {
    auto& groups = optimizer_->param_groups();
    const auto swap = [&] {
      for (size_t g = 0; g < groups.size(); ++g) groups[g].params().swap(others.at(g));
    };
    swap();
    try {
      work();
    } catch (...) {
      swap();
      throw;
    }
    swap();
  }

  /// A state of the optimizer's kind, to be read into: what a step with a zero gradient makes of one element.
  std::unique_ptr<torch::optim::OptimizerParamState> empty_state() {
    if (prototype_) return prototype_->clone();
    const Tensor element = at::ones({1}, parts_.front().values.options());
    element.mutable_grad() = at::zeros_like(element);
    std::vector<std::vector<Tensor>> only(optimizer_->param_groups().size());
    only.at(groups_.front()).push_back(element);
    lend(only, [&] { optimizer_->step(); });
    const auto found = optimizer_->state().find(element.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(found != optimizer_->state().end(), info_->name,
                      " makes no state in a step, but the checkpoint holds some");
    prototype_ = std::move(found->second);
    optimizer_->state().erase(element.unsafeGetTensorImpl());
    return prototype_->clone();
  }

  std::shared_ptr<Optimizer> optimizer_;
  std::vector<size_t> groups_;
  const OptimizerInfo* info_ = nullptr;
  std::string needs_whole_;
  std::map<std::string, Tensor> parameters_;                      // until their parts are adopted
  std::unique_ptr<torch::optim::OptimizerParamState> prototype_;  // of the optimizer's kind, to be read into
  std::vector<ParameterPart> parts_;
  std::vector<std::vector<Tensor>> lent_;  // by the optimizer's group
};

}  // namespace

InitOptions with_optimizer(torch::nn::Module& model, std::shared_ptr<Optimizer> optimizer, InitOptions options,
                           bool elementwise) {
  TORCH_CHECK_VALUE(optimizer != nullptr, "with_optimizer: the optimizer is null");
  TORCH_CHECK_VALUE(!is_one_of<torch::optim::LBFGS>(*optimizer),
                    "with_optimizer: LBFGS computes the loss again in its step, which an engine's step cannot; use an "
                    "optimizer that steps from gradients, such as torch::optim::AdamW");
  std::map<const at::TensorImpl*, std::string> names;
  std::map<std::string, Tensor> parameters;
  for (const NamedTensor& p : describe(model).parameters) {
    names.emplace(p.tensor.unsafeGetTensorImpl(), p.name);
    parameters.emplace(p.name, p.tensor);
  }
  std::vector<size_t> places;
  std::vector<ParameterGroup> groups;
  for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
    ParameterGroup group;
    for (const Tensor& p : optimizer->param_groups()[g].params()) {
      const auto name = names.find(p.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(name != names.end(), "with_optimizer: group ", g, " has a parameter of shape ", p.sizes(),
                        " that is not one of the model's");
      if (p.requires_grad()) group.parameters.push_back(name->second);
    }
    if (group.parameters.empty()) continue;
    places.push_back(g);
    groups.push_back(std::move(group));
  }
  auto custom = std::make_shared<TorchOptimizer>(optimizer, places, std::move(parameters), elementwise);
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].hyperparameters = Hyperparameters(custom->info());
    groups[g].hyperparameters.set("lr", optimizer->param_groups()[places[g]].options().get_lr());
  }
  options.groups = std::move(groups);
  options.custom = std::move(custom);
  return options;
}

}  // namespace deeptide
