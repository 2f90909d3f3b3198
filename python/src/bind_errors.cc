// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Our exceptions as Python classes; torch's own errors keep torch's own translation.
#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include "bindings.h"
#include "deeptide/engine.h"
#include "deeptide/interpreter.h"

namespace deeptide::python {
namespace {

struct ErrorTypes {
  PyObject* config = nullptr;
  PyObject* comm = nullptr;
  PyObject* save_meets_step = nullptr;
  PyObject* checkpoint = nullptr;
  PyObject* non_finite = nullptr;
  PyObject* drift = nullptr;
};

// The classes live as long as the interpreter, which may outlive every static destructor: never freed.
ErrorTypes& error_types() {
  static auto* types = new ErrorTypes;
  return *types;
}

PyObject* add_error(py::module_& module, const char* name, const char* doc, PyObject* base) {
  const std::string qualified = std::string("deeptide.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, base, nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  module.attr(name) = py::handle(type);
  return type;
}

void translate(std::exception_ptr pointer) {
  if (!pointer) {
    return;
  }
  try {
    std::rethrow_exception(pointer);
  } catch (const ConfigError& error) {
    py::set_error(error_types().config, error.what());
  } catch (const SaveMeetsStepError& error) {
    py::set_error(error_types().save_meets_step, error.what());
  } catch (const CommError& error) {
    py::set_error(error_types().comm, error.what());
  } catch (const CheckpointError& error) {
    py::set_error(error_types().checkpoint, error.what());
  } catch (const NonFiniteError& error) {
    py::set_error(error_types().non_finite, error.what());
  } catch (const DriftError& error) {
    py::set_error(error_types().drift, error.what());
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(std::current_exception());
  } catch (const python_error&) {
    // A Python exception that crossed C++, e.g. from a user's autograd function.
    torch::translate_exception_to_python(std::current_exception());
  }
  // Anything else leaves this function and meets pybind11's own translators.
}

/// Waits happen inside torch's operators too, which know Python's exceptions, but not ours.
void throw_in_python(const CommError& error) {
  const py::gil_scoped_acquire gil;
  py::set_error(error_types().comm, error.what());
  throw py::error_already_set();
}

/// A rank that waits with the interpreter's lock would keep other threads' ranks from ever arriving. While the
/// interpreter ends, PyGILState_Check says of every thread that it has the lock: a thread that still computes has not.
void wait_without_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const py::gil_scoped_release no_gil;
    wait();
  } else {
    wait();
  }
}

/// Python runs handlers on its main thread only. Other threads do not ask: they would wait for the lock, and a thread
/// that waits for it while the interpreter ends does not come back.
void check_signals() {
  if (::syscall(SYS_gettid) != ::getpid() || !Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

py::module_ generators() { return py::module_::import("deeptide._process.generators"); }

std::string read_generators() {
  const py::gil_scoped_acquire gil;
  return generators().attr("of_interpreter")().cast<std::string>();
}

void set_generators(const std::string& states) {
  const py::gil_scoped_acquire gil;
  generators().attr("set_interpreter")(py::bytes(states));
}

}  // namespace

void bind_errors(py::module_& module) {
  auto& types = error_types();
  types.config = add_error(module, "ConfigError", "The configuration or an argument is wrong.", PyExc_ValueError);
  types.comm = add_error(module, "CommError", "A peer was lost or a wait timed out.", PyExc_RuntimeError);
  types.save_meets_step =
      add_error(module, "SaveMeetsStepError", "Another rank saves in the handler of an exception.", types.comm);
  types.checkpoint = add_error(module, "CheckpointError", "A checkpoint cannot be written or read, or does not fit.",
                               PyExc_RuntimeError);
  types.non_finite =
      add_error(module, "NonFiniteError", "Too many steps in a row were skipped because gradients are not finite.",
                PyExc_RuntimeError);
  types.drift = add_error(module, "DriftError", "Ranks hold different values of what they all have a copy of.",
                          PyExc_RuntimeError);
  module.def("is_in_update", &is_in_update);
  set_error_thrower(&throw_in_python);
  set_blocking_region(&wait_without_gil);
  set_interrupt_check(&check_signals);
  set_interpreter_generators({&read_generators, &set_generators});
  py::register_local_exception_translator(&translate);
}

}  // namespace deeptide::python
