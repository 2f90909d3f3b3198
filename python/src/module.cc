// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The Python module deeptide._C: the C++ core as Python sees it.
#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of Deeptide.";
  // torch registers the types of tensors, devices and stores that our signatures name.
  py::module_::import("torch");
  deeptide::python::bind_errors(module);
  deeptide::python::bind_optimizer(module);
  deeptide::python::bind_config(module);
  deeptide::python::bind_reports(module);
  deeptide::python::bind_world(module);
  deeptide::python::bind_bench(module);
  deeptide::python::bind_data(module);
  deeptide::python::bind_curriculum(module);
  deeptide::python::bind_device(module);
  deeptide::python::bind_model(module);
  deeptide::python::bind_engine(module);
  deeptide::python::bind_stage(module);
  deeptide::python::bind_tensor(module);
  deeptide::python::bind_plan(module);
  deeptide::python::bind_ops(module);
  deeptide::python::bind_checkpoint(module);
  deeptide::python::bind_parallel(module);
  deeptide::python::bind_ends(module);
}
