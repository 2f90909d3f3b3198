// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds the CPU allocator's figures, for those who weigh a process; the kernels' kind; tensors that have no memory
// yet, or only while an operator uses them.
#include <pybind11/functional.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bindings.h"
#include "deeptide/allocator.h"
#include "deeptide/binding.h"
#include "deeptide/zero.h"

namespace deeptide::python {

namespace {

py::dict kernel_targets() {
  py::dict targets;
  for (const auto& [kind, target] : binding::kernel_targets()) targets[py::str(kind)] = target;
  return targets;
}

/// Calls graph(inputs), which a compiler made and which may empty the list, with the tensors among its inputs whole.
/// `written`: the places of those that it writes.
py::object run_as_operator(const std::function<py::object(py::object)>& graph, const py::object& inputs,
                           const std::vector<size_t>& written) {
  std::vector<at::Tensor> waiting;  // only what the gate looks at: the graph frees its other inputs as it goes
  std::vector<bool> writes;
  const size_t count = py::len(inputs);
  for (size_t i = 0; i < count; ++i) {
    const py::object input = inputs[py::int_(i)];
    if (!THPVariable_Check(input.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(input.ptr());
    if (!zero::has_deferred_key(tensor)) continue;
    waiting.push_back(tensor);
    writes.push_back(std::find(written.begin(), written.end(), i) != written.end());
  }
  py::object result;
  binding::run_as_operator(waiting, writes, [&] { result = graph(inputs); });
  return result;
}

}  // namespace

void bind_device(py::module_& module) {
  py::class_<CpuAllocatorStats>(module, "CpuAllocatorStats",
                                "Bytes of the allocator that deeptide.tune_allocator installs.")
      .def_readonly("in_use_bytes", &CpuAllocatorStats::in_use_bytes)
      .def_readonly("idle_bytes", &CpuAllocatorStats::idle_bytes)
      .def_readonly("peak_bytes", &CpuAllocatorStats::peak_bytes);
  module.def("install_cpu_allocator", &install_cpu_allocator);
  module.def("cpu_allocator_stats", &cpu_allocator_stats);
  module.def("release_idle_cpu_memory", &release_idle_cpu_memory, NoGil());
  py::class_<zero::Init>(module, "ZeroInit", "Defers what operators make for as long as it lives.").def(py::init<>());
  module.def("is_deferred", &zero::is_deferred);
  module.def("has_deferred_key", &zero::has_deferred_key);
  module.def("is_sharded", &zero::is_sharded);
  module.def("address_of", py::overload_cast<const at::Tensor&>(&zero::address_of));
  module.def("address_of_storage", py::overload_cast<const at::Storage&>(&zero::address_of));
  module.def("materialize", &zero::materialize);
  module.def("values_of", &zero::values_of);
  py::class_<zero::ValueParts>(module, "ValueParts", "Makes a deferred tensor's values, some at a time.")
      .def_static("of", &zero::ValueParts::of, py::arg("tensor"))
      .def("next", &zero::ValueParts::next, py::arg("count"));
  module.def("replace_values", &zero::replace_values, py::arg("tensor"), py::arg("values"));
  module.def("lend_memory", &zero::lend_memory);
  module.def("run_as_operator", &run_as_operator, py::arg("graph"), py::arg("inputs"), py::arg("written"));
  using SpillPointer = std::unique_ptr<binding::Spill, DeleteWithoutGil<binding::Spill>>;
  py::class_<binding::Spill, SpillPointer>(module, "Spill", "Keeps saved tensors in the host's memory or in files.")
      .def("put", &binding::Spill::put, py::arg("tensor"), NoGil())
      .def("get", &binding::Spill::get, py::arg("id"), NoGil())
      .def("drop", &binding::Spill::drop, py::arg("id"), NoGil())
      .def("peak_bytes", &binding::Spill::peak_bytes);
  module.def("sharded_unit", &binding::sharded_unit);
  module.def("wait_for_values", py::overload_cast<const at::Tensor&>(&zero::wait_for_values));
  module.def("wait_for_storage", py::overload_cast<const at::Storage&>(&zero::wait_for_values));
  module.def("kernel_targets", &kernel_targets, "The instruction set that each kind of kernel runs on here.");
}

}  // namespace deeptide::python
