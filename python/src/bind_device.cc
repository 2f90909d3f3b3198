// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What the CPU allocator holds, for those who weigh a process; and what the kernels run on.
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
  module.def("kernel_targets", &kernel_targets, "The instruction set that each kind of kernel runs on here.");
}

}  // namespace deeptide::python
