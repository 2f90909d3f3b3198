// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Optimizers of the configuration's table, and hyper-parameters as a mapping from name to number.
#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/hyperparameters.h"

namespace deeptide::python {
namespace {

// Name, key of the param group, place in the key's tuple or -1, whether a flag, and the default.
using Number = std::tuple<std::string, std::string, int, bool, double>;

const OptimizerInfo& make_info(const std::string& name, const std::vector<Number>& numbers) {
  OptimizerInfo info{name, {name}, {}};
  for (const auto& [number, key, element, flag, fallback] : numbers) {
    info.hyperparameters.push_back({number, key, key, element, flag, fallback});
    if (number == "lr") info.hyperparameters.back().lowest = 0.0;
  }
  return kept_optimizer_info(info);
}

void bind_info(py::module_& module) {
  py::class_<HyperparameterInfo>(module, "HyperparameterInfo")
      .def_readonly("name", &HyperparameterInfo::name)
      .def_readonly("config_key", &HyperparameterInfo::config_key)
      .def_readonly("group_key", &HyperparameterInfo::group_key)
      .def_readonly("element", &HyperparameterInfo::element)
      .def_readonly("flag", &HyperparameterInfo::flag)
      .def_readonly("fallback", &HyperparameterInfo::fallback)
      .def_readonly("lowest", &HyperparameterInfo::lowest)
      .def_readonly("highest", &HyperparameterInfo::highest)
      .def_readonly("highest_excluded", &HyperparameterInfo::highest_excluded);
  py::class_<OptimizerInfo>(module, "OptimizerInfo", "An optimizer that the configuration's table offers.")
      .def_readonly("name", &OptimizerInfo::name)
      .def_readonly("types", &OptimizerInfo::types)
      .def_readonly("hyperparameters", &OptimizerInfo::hyperparameters)
      .def("state_roles", &binding::state_roles);
  module.def("kept_optimizer_info", &make_info, py::arg("name"), py::arg("numbers"),
             py::return_value_policy::reference);
  module.def("optimizers", &optimizers, py::return_value_policy::reference);
  module.def("is_muon_matrix", &binding::is_muon_matrix, py::arg("name"), py::arg("sizes"));
  module.def("find_optimizer", &find_optimizer, py::arg("type"), py::return_value_policy::reference);
}

std::vector<std::string> names_of(const Hyperparameters& values) {
  std::vector<std::string> names;
  if (!values.optimizer()) return names;
  for (const HyperparameterInfo& info : values.optimizer()->hyperparameters) names.push_back(info.name);
  return names;
}

}  // namespace

void bind_optimizer(py::module_& module) {
  bind_info(module);
  py::class_<Hyperparameters>(module, "Hyperparameters", "One group's hyper-parameters by name.")
      .def(py::init<const Hyperparameters&>(), py::arg("other"))
      .def(py::init<std::string_view>(), py::arg("type"))
      .def(py::init<const OptimizerInfo&>(), py::arg("info"))
      .def_property_readonly("optimizer", &Hyperparameters::optimizer, py::return_value_policy::reference)
      .def("keys", &names_of)
      .def(
          "get",
          [](const Hyperparameters& values, std::string_view name, double absent) {
            return values.has(name) ? values.get(name) : absent;
          },
          py::arg("name"), py::arg("absent"))
      .def("__contains__", &Hyperparameters::has)
      .def("__getitem__", &Hyperparameters::get)
      .def("__setitem__", [](Hyperparameters& values, std::string_view name, double value) { values.set(name, value); })
      .def(
          "__eq__", [](const Hyperparameters& one, const Hyperparameters& other) { return one == other; },
          py::is_operator())
      .def("__repr__", [](const Hyperparameters& values) {
        return values.optimizer() ? "<Hyperparameters of " + values.optimizer()->name + ">" : "<Hyperparameters>";
      });
}

}  // namespace deeptide::python
