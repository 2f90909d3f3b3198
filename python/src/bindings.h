// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Declares one function per area, each filling the module `deeptide._C`.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace deeptide {
class CustomOptimizer;
class Engine;
}  // namespace deeptide

namespace deeptide::python {

/// `optimizer`: a deeptide._custom_optimizer.PartStepper, or None for none.
std::shared_ptr<CustomOptimizer> make_custom_optimizer(const py::object& optimizer);

/// The engine's place in a pipeline, as a Python object that does not keep the engine alive.
py::object make_stage(const std::shared_ptr<Engine>& engine);

/// Deletes with the GIL released: what we hold may wait for a peer, a thread or a device when it goes.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* pointer) const { torch::impl::destroy_without_gil(pointer); }
};

/// For functions that may block or compute: another thread of this process may need the GIL meanwhile.
using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_errors(py::module_& module);
void bind_config(py::module_& module);
void bind_world(py::module_& module);
void bind_data(py::module_& module);
void bind_curriculum(py::module_& module);
void bind_bench(py::module_& module);
void bind_device(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_model(py::module_& module);
void bind_engine(py::module_& module);
void bind_stage(py::module_& module);
void bind_tensor(py::module_& module);
void bind_reports(py::module_& module);
void bind_plan(py::module_& module);
void bind_ops(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_parallel(py::module_& module);
void bind_ends(py::module_& module);

}  // namespace deeptide::python
