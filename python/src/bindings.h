// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Declares one function per area, each filling the module `deeptide._C`.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>

namespace deeptide {
class CustomOptimizer;
class Engine;
}  // namespace deeptide

namespace deeptide::python {

/// `optimizer`: a deeptide._optimizers.custom.PartStepper, or None for none.
std::shared_ptr<CustomOptimizer> make_custom_optimizer(const py::object& optimizer);

/// The engine's place in a pipeline, as a Python object that does not keep the engine alive.
py::object make_stage(const std::shared_ptr<Engine>& engine);

/// Deletes with the GIL released: what we hold may wait for a peer, a thread or a device when it goes.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* pointer) const { torch::impl::destroy_without_gil(pointer); }
};

/// While it lives, torch keeps its warnings of this thread and of backward passes that it runs; at the end they become
/// Python's, as from torch's own functions. Without it they would go to stderr, past filters and records of warnings.
class PythonWarnings {
 public:
  PythonWarnings() = default;
  PythonWarnings(const PythonWarnings&) = delete;
  /// Errors: the warning's, where a filter makes it one. Takes the GIL if there were warnings.
  ~PythonWarnings() noexcept(false) {
    if (std::uncaught_exceptions() > exceptions_) handler_.set_in_exception();
  }

 private:
  const int exceptions_ = std::uncaught_exceptions();
  torch::PyWarningHandler handler_;
};

/// For functions that may block or compute: another thread of this process may need the GIL meanwhile.
using NoGil = py::call_guard<PythonWarnings, py::gil_scoped_release>;

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
