// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// World: rank, size and the store, made from torch.distributed's objects or from the environment.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "deeptide/world.h"

namespace deeptide::python {
namespace {

// By name: the group's Python object and ours need not agree on how they hold it.
void use_group(World& world, const std::string& name, c10::Device device) {
  world.backend = c10d::resolve_process_group(name)->getBackend(device.type());
}

World discover(double timeout_s) {
  return init_distributed(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)));
}

std::string describe_world(const World& world) {
  return "World(rank=" + std::to_string(world.rank) + ", size=" + std::to_string(world.size) +
         ", local_rank=" + std::to_string(world.local_rank) + ", source='" + world.source + "')";
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<World, std::unique_ptr<World, DeleteWithoutGil<World>>>(module, "World", "A rank's place in the world.")
      .def_readonly("rank", &World::rank)
      .def_readonly("size", &World::size)
      .def_readwrite("local_rank", &World::local_rank)
      .def_readwrite("source", &World::source)
      .def_property_readonly("store", [](const World& world) { return world.store; })
      .def("use_group", &use_group, py::arg("group_name"), py::arg("device"), NoGil())
      .def("__repr__", &describe_world);
  module.def("make_world", &make_world, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("host") = "",
             NoGil());
  module.def("init_distributed", &discover, py::arg("timeout_s") = 300.0, NoGil());
}

}  // namespace deeptide::python
