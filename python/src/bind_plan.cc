// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds the plan of an engine, and the limits of this machine's control groups.
#include <pybind11/stl.h>

#include "bindings.h"
#include "deeptide/plan.h"
#include "deeptide/tensor_team.h"

namespace deeptide::python {
namespace {

/// `is_stage`: the ranks are one stage of a pipeline. `tensor`: so many neighbouring ranks share each of `slices`, by
/// name, dimension and blocks.
MemoryPlan make_plan(const ModelDescription& model, const Config& config, const InitOptions& options, int world_size,
                     int ranks_per_host, bool is_stage, int tensor,
                     const std::vector<std::tuple<std::string, int64_t, std::vector<int64_t>>>& slices) {
  const py::gil_scoped_release no_gil;
  InitOptions meshed = options;
  if (tensor > 1) {
    std::vector<TensorSlice> cut;
    for (const auto& [name, dim, blocks] : slices) cut.push_back({name, dim, blocks});
    meshed.axes = tensor_axes({.tensor = tensor}, world_size, std::move(cut), {}, nullptr);
  }
  return plan(model, config, meshed, {.size = world_size, .ranks_per_host = ranks_per_host, .is_stage = is_stage});
}

/// Folders that the configuration names for files.
std::vector<std::string> offload_folders(const Config& config) {
  for (const auto* folders :
       {&config.placement().folders, &config.offload_param().folders, &config.offload_optimizer().folders}) {
    if (!folders->empty()) return *folders;
  }
  return {};
}

std::vector<PlanChoice> make_choices(const ModelDescription& model, const Config& config, const InitOptions& options,
                                     int world_size, int ranks_per_host, const MachineLimits& machine) {
  const py::gil_scoped_release no_gil;
  return plan_choices(model, config, machine, options, {.size = world_size, .ranks_per_host = ranks_per_host});
}

void bind_machine(py::module_& module) {
  py::class_<FolderSpace>(module, "FolderSpace", "A folder for files; those of one device share what is free.")
      .def(py::init<std::string, int64_t, uint64_t>(), py::arg("folder"), py::arg("free_bytes"), py::arg("device") = 0)
      .def_readonly("folder", &FolderSpace::folder)
      .def_readonly("free_bytes", &FolderSpace::free_bytes)
      .def_readonly("device", &FolderSpace::device);
  py::class_<MachineLimits>(module, "MachineLimits", "What one host has left, in bytes.")
      .def(py::init<int64_t, std::string, std::optional<int64_t>, std::optional<int64_t>, std::vector<FolderSpace>>(),
           py::arg("memory_bytes"), py::arg("bound"), py::arg("shared_memory_bytes") = py::none(),
           py::arg("lockable_bytes") = py::none(), py::arg("folders") = std::vector<FolderSpace>())
      .def_readonly("memory_bytes", &MachineLimits::memory_bytes)
      .def_readonly("bound", &MachineLimits::bound)
      .def_readonly("shared_memory_bytes", &MachineLimits::shared_memory_bytes)
      .def_readonly("lockable_bytes", &MachineLimits::lockable_bytes)
      .def_readonly("folders", &MachineLimits::folders);
  py::class_<PlanChoice>(module, "PlanChoice", "One stage and placement, and what it takes.")
      .def_readonly("name", &PlanChoice::name)
      .def_readonly("sections", &PlanChoice::sections)
      .def_readonly("plan", &PlanChoice::plan)
      .def_readonly("why_not", &PlanChoice::why_not);
  module.def("machine_limits", &machine_limits, py::arg("folders"));
  module.def("plan_choices", &make_choices, py::arg("model"), py::arg("config"), py::arg("options"),
             py::arg("world_size"), py::arg("ranks_per_host"), py::arg("machine"));
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<PlanLine>(module, "PlanLine", "One role's bytes on one rank.")
      .def_property_readonly("role", [](const PlanLine& line) { return text(line.role); })
      .def_readonly("memory_bytes", &PlanLine::memory_bytes)
      .def_readonly("late_bytes", &PlanLine::late_bytes)
      .def_readonly("file_bytes", &PlanLine::file_bytes)
      .def_readonly("off_device_bytes", &PlanLine::off_device_bytes);
  py::class_<PlanPhase>(module, "PlanPhase", "The memory of one rank while it is in a phase.")
      .def_readonly("name", &PlanPhase::name)
      .def_readonly("memory_bytes", &PlanPhase::memory_bytes);
  py::class_<PlanTransfer>(module, "PlanTransfer", "What one rank exchanges of one kind in a step, in bytes.")
      .def_readonly("kind", &PlanTransfer::kind)
      .def_readonly("bytes", &PlanTransfer::bytes)
      .def_readonly("within_bytes", &PlanTransfer::within_bytes)
      .def_readonly("between_bytes", &PlanTransfer::between_bytes);
  py::class_<MemoryPlan>(module, "MemoryPlan", "What an engine would take, before any of it is taken.")
      .def_readonly("stage", &MemoryPlan::stage)
      .def_property_readonly("world_size", [](const MemoryPlan& plan) { return plan.world.size; })
      .def_property_readonly("ranks_per_host", [](const MemoryPlan& plan) { return plan.world.ranks_per_host; })
      .def_readonly("num_parameters", &MemoryPlan::num_parameters)
      .def_readonly("num_trained", &MemoryPlan::num_trained)
      .def_readonly("num_units", &MemoryPlan::num_units)
      .def_readonly("shares_memory", &MemoryPlan::shares_memory)
      .def_readonly("lines", &MemoryPlan::lines)
      .def_readonly("phases", &MemoryPlan::phases)
      .def_readonly("transfers", &MemoryPlan::transfers);
  module.def("plan", &make_plan, py::arg("model"), py::arg("config"), py::arg("options"), py::arg("world_size"),
             py::arg("ranks_per_host"), py::arg("is_stage") = false, py::arg("tensor") = 1,
             py::arg("slices") = py::list());
  module.def("offload_folders", &offload_folders, py::arg("config"));
  bind_machine(module);
}

}  // namespace deeptide::python
