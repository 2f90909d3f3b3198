// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// TensorTeam, the mesh of a job whose layers are cut, and the engine's options.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"
#include "deeptide/engine.h"
#include "deeptide/pipeline_stage.h"
#include "deeptide/tensor_team.h"

namespace deeptide::python {
namespace {

using Slices = std::vector<std::tuple<std::string, int64_t, std::vector<int64_t>>>;
using Team = std::shared_ptr<TensorTeam>;

MeshSizes mesh_of(int pipeline, int tensor, std::optional<int> data) { return {pipeline, tensor, data}; }

/// Null: all ranks are on the data axis.
std::shared_ptr<const engine::Axes> axes_of(const std::optional<World>& world, int stages, const Team& team,
                                            const Slices& slices, const std::vector<std::string>& adding) {
  const int ranks = world ? world->size : 1;
  if (!team) return stages > 1 ? pipeline_axes(stages, ranks) : nullptr;
  std::vector<TensorSlice> cut;
  for (const auto& [name, dim, blocks] : slices) cut.push_back({name, dim, blocks});
  return tensor_axes({.pipeline = stages, .tensor = team->size()}, ranks, std::move(cut), adding, team);
}

using Buffers = std::function<std::vector<std::pair<std::string, at::Tensor>>()>;

std::function<std::vector<NamedTensor>()> named(std::optional<Buffers> buffers) {
  if (!buffers) return nullptr;
  return [buffers = *std::move(buffers)] {
    std::vector<NamedTensor> all;
    for (auto& [name, tensor] : buffers()) all.push_back({std::move(name), std::move(tensor)});
    return all;
  };
}

using OptionsPtr = std::unique_ptr<InitOptions, DeleteWithoutGil<InitOptions>>;

OptionsPtr make_options(std::optional<World> world, std::vector<ParameterGroup> groups,
                        std::optional<std::string> optimizer, std::optional<std::function<ModelDescription()>> describe,
                        std::optional<Buffers> buffers, const py::object& custom, int stages,
                        const std::optional<Team>& team, const Slices& slices, const std::vector<std::string>& adding) {
  auto axes = axes_of(world, stages, team.value_or(nullptr), slices, adding);
  return OptionsPtr(new InitOptions{std::move(world), std::move(groups), std::move(optimizer),
                                    std::move(describe).value_or(nullptr), named(std::move(buffers)),
                                    make_custom_optimizer(custom), std::move(axes)});
}

}  // namespace

void bind_tensor(py::module_& module) {
  py::class_<TensorTeam, Team> team(module, "TensorTeam", "Neighbouring ranks that share layers.");
  py::class_<TensorTeam::Sum>(team, "Sum", "A sum that travels while its rank computes.")
      .def("wait", &TensorTeam::Sum::wait, NoGil());
  const py::keep_alive<0, 1> sum_keeps_team;
  team.def(py::init<const World&, int, double, int>(), py::arg("world"), py::arg("size"), py::arg("timeout_s"),
           py::arg("stages") = 1, NoGil())
      .def_property_readonly("size", &TensorTeam::size)
      .def_property_readonly("index", &TensorTeam::index)
      .def_property_readonly("data_rank", &TensorTeam::data_rank)
      .def_property_readonly("data_size", &TensorTeam::data_size)
      .def("note_own_groups", &TensorTeam::note_own_groups)
      .def("all_reduce", &TensorTeam::all_reduce, py::arg("tensor"), py::arg("phase"), NoGil())
      .def("reduce_scatter", &TensorTeam::reduce_scatter, py::arg("tensor"), py::arg("phase"), NoGil())
      .def("start_all_reduce", &TensorTeam::start_all_reduce, py::arg("tensor"), py::arg("phase"), NoGil(),
           sum_keeps_team)
      .def("start_reduce_scatter", &TensorTeam::start_reduce_scatter, py::arg("tensor"), py::arg("phase"), NoGil(),
           sum_keeps_team)
      .def("all_gather", &TensorTeam::all_gather, py::arg("tensor"), py::arg("phase"), NoGil())
      .def("broadcast", &TensorTeam::broadcast, py::arg("tensor"), py::arg("phase"), NoGil());
  module.def(
      "check_mesh",
      [](int ranks, int pipeline, int tensor, std::optional<int> data) {
        check_mesh(mesh_of(pipeline, tensor, data), ranks);
      },
      py::arg("ranks"), py::arg("pipeline") = 1, py::arg("tensor") = 1, py::arg("data") = std::nullopt);
  py::class_<InitOptions, OptionsPtr>(module, "InitOptions")
      .def(py::init(&make_options), py::arg("world") = std::nullopt, py::arg("groups") = std::vector<ParameterGroup>(),
           py::arg("optimizer") = std::nullopt, py::arg("describe") = std::nullopt, py::arg("buffers") = std::nullopt,
           py::arg("custom") = py::none(), py::arg("stages") = 1, py::arg("team") = std::nullopt,
           py::arg("slices") = Slices(), py::arg("adding") = std::vector<std::string>());
}

}  // namespace deeptide::python
