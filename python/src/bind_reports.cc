// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds what is observed of a run: step times, collectives, scalars, counted operators, and their sections.
#include <memory>

#include "bindings.h"
#include "deeptide/config.h"
#include "deeptide/profiler.h"
#include "deeptide/reports.h"

namespace deeptide::python {
namespace {

/// A count that Python begins and ends at moments of its choosing, both in one thread.
class Counting {
 public:
  void start() { counter_ = std::make_unique<OperatorCounter>(); }
  void stop() {
    if (!counter_) return;
    uses_ = counter_->uses();
    counter_.reset();
  }
  void set_module(int module) {
    if (counter_) counter_->set_module(module);
  }
  std::vector<OperatorUse> uses() const { return counter_ ? counter_->uses() : uses_; }

 private:
  std::unique_ptr<OperatorCounter> counter_;
  std::vector<OperatorUse> uses_;
};

void bind_monitor_sections(py::module_& module) {
  py::class_<TensorboardConfig>(module, "TensorboardConfig")
      .def_readonly("enabled", &TensorboardConfig::enabled)
      .def_readonly("output_path", &TensorboardConfig::output_path)
      .def_readonly("job_name", &TensorboardConfig::job_name);
  py::class_<WandbConfig>(module, "WandbConfig")
      .def_readonly("enabled", &WandbConfig::enabled)
      .def_readonly("group", &WandbConfig::group)
      .def_readonly("team", &WandbConfig::team)
      .def_readonly("project", &WandbConfig::project);
  py::class_<CometConfig>(module, "CometConfig")
      .def_readonly("enabled", &CometConfig::enabled)
      .def_readonly("samples_log_interval", &CometConfig::samples_log_interval)
      .def_readonly("project", &CometConfig::project)
      .def_readonly("workspace", &CometConfig::workspace)
      .def_readonly("api_key", &CometConfig::api_key)
      .def_readonly("experiment_name", &CometConfig::experiment_name)
      .def_readonly("experiment_key", &CometConfig::experiment_key)
      .def_readonly("online", &CometConfig::online)
      .def_readonly("mode", &CometConfig::mode);
  py::class_<CsvMonitorConfig>(module, "CsvMonitorConfig")
      .def_readonly("enabled", &CsvMonitorConfig::enabled)
      .def_readonly("output_path", &CsvMonitorConfig::output_path)
      .def_readonly("job_name", &CsvMonitorConfig::job_name);
  py::class_<FlopsProfilerConfig>(module, "FlopsProfilerConfig")
      .def_readonly("enabled", &FlopsProfilerConfig::enabled)
      .def_readonly("recompute_fwd_factor", &FlopsProfilerConfig::recompute_fwd_factor)
      .def_readonly("profile_step", &FlopsProfilerConfig::profile_step)
      .def_readonly("module_depth", &FlopsProfilerConfig::module_depth)
      .def_readonly("top_modules", &FlopsProfilerConfig::top_modules)
      .def_readonly("detailed", &FlopsProfilerConfig::detailed)
      .def_readonly("output_file", &FlopsProfilerConfig::output_file);
}

void bind_facts(py::module_& module) {
  py::class_<StepTimes>(module, "StepTimes", "How a rank spent a step, in seconds.")
      .def_readonly("total", &StepTimes::total)
      .def_readonly("between", &StepTimes::between)
      .def_readonly("forward", &StepTimes::forward)
      .def_readonly("backward", &StepTimes::backward)
      .def_readonly("step", &StepTimes::step)
      .def_readonly("waiting", &StepTimes::waiting)
      .def_readonly("backward_waiting", &StepTimes::backward_waiting)
      .def_readonly("files", &StepTimes::files)
      .def_readonly("optimizer", &StepTimes::optimizer)
      .def_property_readonly("computing", &StepTimes::computing);
  py::class_<CollectiveLine>(module, "CollectiveLine", "Collectives of one kind and size.")
      .def_readonly("operation", &CollectiveLine::operation)
      .def_readonly("bytes", &CollectiveLine::bytes)
      .def_readonly("count", &CollectiveLine::count)
      .def_readonly("total_ms", &CollectiveLine::total_ms)
      .def_readonly("mean_ms", &CollectiveLine::mean_ms)
      .def_readonly("algorithm_gbps", &CollectiveLine::algorithm_gbps)
      .def_readonly("bus_gbps", &CollectiveLine::bus_gbps);
  py::class_<MonitorEvent>(module, "MonitorEvent", "A scalar for monitors; x in samples.")
      .def_readonly("name", &MonitorEvent::name)
      .def_readonly("value", &MonitorEvent::value)
      .def_readonly("x", &MonitorEvent::x);
}

}  // namespace

void bind_reports(py::module_& module) {
  bind_monitor_sections(module);
  bind_facts(module);
  py::class_<OperatorUse>(module, "OperatorUse", "One operator in one module and direction.")
      .def_readonly("module", &OperatorUse::module)
      .def_readonly("backward", &OperatorUse::backward)
      .def_readonly("name", &OperatorUse::name)
      .def_readonly("calls", &OperatorUse::calls)
      .def_readonly("macs", &OperatorUse::macs)
      .def_readonly("bytes", &OperatorUse::bytes)
      .def_readonly("seconds", &OperatorUse::seconds)
      .def_readonly("is_uncounted", &OperatorUse::is_uncounted);
  py::class_<Counting>(module, "OperatorCounter", "Counts this thread's operators between start() and stop().")
      .def(py::init<>())
      .def("start", &Counting::start)
      .def("stop", &Counting::stop)
      .def("set_module", &Counting::set_module, py::arg("module"))
      .def("uses", &Counting::uses);
  py::class_<MachinePeak>(module, "MachinePeak", "How fast this machine multiplies and moves.")
      .def_readonly("flops_per_s", &MachinePeak::flops_per_s)
      .def_readonly("bytes_per_s", &MachinePeak::bytes_per_s)
      .def("share_of", &MachinePeak::share_of, py::arg("flops"), py::arg("seconds"));
  module.def(
      "measure_peak", [](c10::Device device, c10::ScalarType dtype) { return measure_peak(device, dtype); },
      py::arg("device"), py::arg("dtype"), NoGil());
}

}  // namespace deeptide::python
