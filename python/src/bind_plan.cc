// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an engine would take, and what this machine's control groups leave.
#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/plan.h"

namespace deeptide::python {
namespace {

MemoryPlan make_plan(const ModelDescription& model, const Config& config, const InitOptions& options, int world_size,
                     int ranks_per_host) {
  const py::gil_scoped_release no_gil;
  return plan(model, config, options, {.size = world_size, .ranks_per_host = ranks_per_host});
}

/// Folders that the configuration names for files.
std::vector<std::string> offload_folders(const Config& config) {
  for (const auto* folders :
       {&config.placement().folders, &config.offload_param().folders, &config.offload_optimizer().folders}) {
    if (!folders->empty()) return *folders;
  }
  return {};
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<PlanLine>(module, "PlanLine", "One role's bytes on one rank.")
      .def_property_readonly("role", [](const PlanLine& line) { return text(line.role); })
      .def_readonly("memory_bytes", &PlanLine::memory_bytes)
      .def_readonly("late_bytes", &PlanLine::late_bytes)
      .def_readonly("file_bytes", &PlanLine::file_bytes);
  py::class_<PlanPhase>(module, "PlanPhase", "The memory of one rank while it is in a phase.")
      .def_readonly("name", &PlanPhase::name)
      .def_readonly("memory_bytes", &PlanPhase::memory_bytes);
  py::class_<MemoryPlan>(module, "MemoryPlan", "What an engine would take, before any of it is taken.")
      .def_readonly("stage", &MemoryPlan::stage)
      .def_property_readonly("world_size", [](const MemoryPlan& plan) { return plan.world.size; })
      .def_property_readonly("ranks_per_host", [](const MemoryPlan& plan) { return plan.world.ranks_per_host; })
      .def_readonly("num_parameters", &MemoryPlan::num_parameters)
      .def_readonly("num_trained", &MemoryPlan::num_trained)
      .def_readonly("num_units", &MemoryPlan::num_units)
      .def_readonly("shares_memory", &MemoryPlan::shares_memory)
      .def_readonly("lines", &MemoryPlan::lines)
      .def_readonly("phases", &MemoryPlan::phases);
  module.def("plan", &make_plan, py::arg("model"), py::arg("config"), py::arg("options"), py::arg("world_size"),
             py::arg("ranks_per_host"));
  module.def(
      "config_with", [](const Config& config, const std::string& patch) { return config.with(patch); },
      py::arg("config"), py::arg("patch"));
  module.def("offload_folders", &offload_folders, py::arg("config"));
  module.def("tightest_memory_limit", &binding::tightest_memory_limit);
}

}  // namespace deeptide::python
