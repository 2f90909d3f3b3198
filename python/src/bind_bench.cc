// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The benchmark of collectives, for `deeptide bench comm`.
#include "bindings.h"
#include "deeptide/binding.h"

namespace deeptide::python {
namespace {

using binding::CollectiveBench;
using binding::CollectiveTimes;

}  // namespace

void bind_bench(py::module_& module) {
  py::class_<CollectiveTimes>(module, "CollectiveTimes", "What one collective of one size took.")
      .def_readonly("bytes", &CollectiveTimes::bytes)
      .def_readonly("seconds", &CollectiveTimes::seconds);
  py::class_<CollectiveBench, std::unique_ptr<CollectiveBench, DeleteWithoutGil<CollectiveBench>>>(
      module, "CollectiveBench", "Collectives as an engine's groups do them, checked and timed.")
      .def(py::init<const World&, at::ScalarType, at::Device, int64_t, bool>(), py::arg("world"), py::arg("dtype"),
           py::arg("device"), py::arg("max_bytes"), py::arg("shared_memory") = true, NoGil())
      .def_property_readonly("path", &CollectiveBench::path)
      .def_property_readonly("num_hosts", &CollectiveBench::num_hosts)
      .def("measure", &CollectiveBench::measure, py::arg("collective"), py::arg("bytes"), py::arg("warmups"),
           py::arg("trials"), NoGil());
  module.def("bus_factor", &binding::bus_factor, py::arg("collective"), py::arg("world_size"));
}

}  // namespace deeptide::python
