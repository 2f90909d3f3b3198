// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// An optimizer written in Python as the engine calls it; every call takes the GIL.
#include <memory>
#include <tuple>

#include "bindings.h"
#include "deeptide/custom_optimizer.h"
#include "deeptide/errors.h"

namespace deeptide::python {
namespace {

using State = std::vector<std::tuple<std::string, at::Tensor, bool>>;

/// `optimizer`: a deeptide._optimizers.custom.PartStepper.
class PythonOptimizer final : public CustomOptimizer {
 public:
  explicit PythonOptimizer(py::object optimizer)
      : optimizer_(std::move(optimizer)),
        info_(optimizer_.attr("info").cast<const OptimizerInfo&>()),
        needs_whole_(optimizer_.attr("needs_whole").cast<std::string>()) {}
  ~PythonOptimizer() override {
    const py::gil_scoped_acquire gil;
    optimizer_ = py::object();
  }

  const OptimizerInfo& info() const override { return info_; }
  std::string needs_whole() const override { return needs_whole_; }

  void adopt(std::vector<ParameterPart> parts) override {
    const py::gil_scoped_acquire gil;
    py::list list;
    for (const ParameterPart& part : parts) {
      list.append(py::make_tuple(part.parameter, part.group, part.begin, part.values));
    }
    optimizer_.attr("adopt")(list);
  }

  void step(const std::vector<at::Tensor>& gradients, const std::vector<Hyperparameters>& groups) override {
    const py::gil_scoped_acquire gil;
    optimizer_.attr("step")(gradients, groups);
  }

  std::vector<PartState> state(size_t part) override {
    const py::gil_scoped_acquire gil;
    std::vector<PartState> states;
    try {
      for (auto& [name, value, per_element] : optimizer_.attr("state")(part).cast<State>()) {
        states.push_back({name, std::move(value), per_element});
      }
    } catch (const py::error_already_set& error) {
      throw CheckpointError(py::str(error.value()));  // other ranks read it: without Python's stack
    }
    return states;
  }

  void set_state(size_t part, std::vector<PartState> state) override {
    const py::gil_scoped_acquire gil;
    State list;
    for (PartState& entry : state) list.emplace_back(entry.name, std::move(entry.value), entry.per_element);
    optimizer_.attr("set_state")(part, list);
  }

 private:
  py::object optimizer_;
  const OptimizerInfo& info_;
  std::string needs_whole_;
};

}  // namespace

std::shared_ptr<CustomOptimizer> make_custom_optimizer(const py::object& optimizer) {
  return optimizer.is_none() ? nullptr : std::make_shared<PythonOptimizer>(optimizer);
}

}  // namespace deeptide::python
