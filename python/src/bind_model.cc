// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds the engine's arguments (model, groups, options) and results (outcomes, memory).
#include <pybind11/functional.h>

#include <cstdio>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "deeptide/engine.h"
#include "deeptide/weights.h"

namespace deeptide::python {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Modules = std::vector<std::pair<std::string, std::string>>;
using Fp32Patterns = std::vector<std::tuple<std::string, std::string, bool>>;

ModelDescription make_description(const NamedTensors& parameters, const NamedTensors& buffers, const Modules& modules,
                                  const NamedTensors& transient_buffers, const Fp32Patterns& in_fp32) {
  ModelDescription description;
  for (const auto& [name, tensor] : parameters) {
    description.parameters.push_back({name, tensor});
  }
  for (const auto& [name, tensor] : buffers) {
    description.buffers.push_back({name, tensor});
  }
  for (const auto& [path, type] : modules) {
    description.modules.push_back({path, type});
  }
  for (const auto& [name, tensor] : transient_buffers) {
    description.transient_buffers.push_back({name, tensor});
  }
  for (const auto& [path, pattern, fp16_only] : in_fp32) {
    description.in_fp32.push_back({path, pattern, fp16_only});
  }
  return description;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

std::string outcome_repr(const StepOutcome& outcome) {
  std::string text = "StepOutcome(step=" + std::to_string(outcome.step);
  if (!outcome.applied()) {
    text += ", not applied: " + outcome.reason;
    if (!outcome.parameter.empty()) {
      text += " in '" + outcome.parameter + "'";
    }
    if (outcome.rank >= 0) {
      text += " on rank " + std::to_string(outcome.rank) + outcome.place;
    }
    if (!outcome.phase.empty()) {
      text += ", in " + outcome.phase;
    }
    return text + ")";
  }
  return text + ", applied, lr=" + number(outcome.lr) + ", grad_norm=" + number(outcome.grad_norm) +
         ", clipped_norm=" + number(outcome.clipped_norm) + ")";
}

std::string memory_repr(const MemoryLine& line) {
  std::string repr = std::string(text(line.role)) + ": predicted " + std::to_string(line.predicted_bytes) +
                     " B, measured " + std::to_string(line.measured_bytes) + " B";
  if (line.measured_late_bytes > 0) {
    repr += ", while a rank was late " + std::to_string(line.measured_late_bytes) + " B of at most " +
            std::to_string(line.late_bytes) + " B";
  }
  if (line.off_device_bytes > 0) {
    repr += ", in the host's memory predicted " + std::to_string(line.off_device_bytes) + " B, measured " +
            std::to_string(line.measured_off_device_bytes) + " B";
  }
  return repr;
}

void bind_results(py::module_& module) {
  py::enum_<StepResult>(module, "StepResult", "What a call of Engine.step() did with the parameters.")
      .value("applied", StepResult::applied)
      .value("accumulating", StepResult::accumulating)
      .value("non_finite", StepResult::non_finite);
  py::class_<StepOutcome>(module, "StepOutcome", "What a call of Engine.step() did; true when it was applied.")
      .def_property_readonly("applied", &StepOutcome::applied)
      .def_readonly("result", &StepOutcome::result)
      .def_readonly("step", &StepOutcome::step)
      .def_readonly("lr", &StepOutcome::lr)
      .def_readonly("grad_norm", &StepOutcome::grad_norm)
      .def_readonly("clipped_norm", &StepOutcome::clipped_norm)
      .def_readonly("loss_scale", &StepOutcome::loss_scale)
      .def_readonly("reason", &StepOutcome::reason)
      .def_readonly("parameter", &StepOutcome::parameter)
      .def_readonly("rank", &StepOutcome::rank)
      .def_readonly("phase", &StepOutcome::phase)
      .def_readonly("sent_bytes", &StepOutcome::sent_bytes)
      .def_readonly("rounding", &StepOutcome::rounding)
      .def_readonly("largest_rounding", &StepOutcome::largest_rounding)
      .def_readonly("preempted", &StepOutcome::preempted)
      .def_readonly("saved", &StepOutcome::saved)
      .def_readonly("save_error", &StepOutcome::save_error)
      .def_readonly("rewound_to", &StepOutcome::rewound_to)
      .def_readonly("kept", &StepOutcome::kept)
      .def("__bool__", [](const StepOutcome& outcome) { return outcome.applied(); })
      .def("__repr__", &outcome_repr);
  py::class_<MemoryLine>(module, "MemoryLine", "One line of the memory table, in bytes on this rank.")
      .def_property_readonly("role", [](const MemoryLine& line) { return text(line.role); })
      .def_readonly("predicted_bytes", &MemoryLine::predicted_bytes)
      .def_readonly("measured_bytes", &MemoryLine::measured_bytes)
      .def_readonly("late_bytes", &MemoryLine::late_bytes)
      .def_readonly("measured_late_bytes", &MemoryLine::measured_late_bytes)
      .def_readonly("off_device_bytes", &MemoryLine::off_device_bytes)
      .def_readonly("measured_off_device_bytes", &MemoryLine::measured_off_device_bytes)
      .def("__repr__", &memory_repr);
}

using NamesOfBoth = std::pair<std::vector<std::string>, std::vector<std::string>>;

NamesOfBoth load_into(const NamedTensors& targets, const std::string& path, bool strict) {
  std::vector<NamedTensor> named;
  for (const auto& [name, tensor] : targets) named.push_back({name, tensor});
  LoadedWeights loaded = load_weights(named, path, strict);
  return {std::move(loaded.missing), std::move(loaded.unexpected)};
}

void bind_weights(py::module_& module) {
  module.def("load_weights", &load_into, py::arg("targets"), py::arg("path"), py::arg("strict") = true, NoGil());
  module.def("import_checkpoint", &import_checkpoint, py::arg("source"), py::arg("directory"),
             py::arg("source_tag") = "", py::arg("tag") = "", NoGil());
  module.def("describe_torch_file", &describe_torch_file, py::arg("path"), NoGil());
}

}  // namespace

void bind_model(py::module_& module) {
  py::class_<ModelDescription, std::unique_ptr<ModelDescription, DeleteWithoutGil<ModelDescription>>>(
      module, "ModelDescription")
      .def(py::init(&make_description), py::arg("parameters"), py::arg("buffers"), py::arg("modules"),
           py::arg("transient_buffers") = NamedTensors(), py::arg("in_fp32") = Fp32Patterns());
  py::class_<ParameterGroup>(module, "ParameterGroup")
      .def(py::init([](std::vector<std::string> parameters, const Hyperparameters& hyperparameters) {
             return ParameterGroup{std::move(parameters), hyperparameters};
           }),
           py::arg("parameters"), py::arg("hyperparameters"))
      .def_readonly("parameters", &ParameterGroup::parameters)
      .def_readonly("hyperparameters", &ParameterGroup::hyperparameters);
  bind_results(module);
  bind_weights(module);
}

}  // namespace deeptide::python
