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

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

World discover(double timeout_s) { return init_distributed(milliseconds_of(timeout_s)); }

World join(const Discovery& place, double timeout_s) { return join_world(place, milliseconds_of(timeout_s)); }

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
  py::class_<Discovery>(module, "Discovery", "What a launcher's variables say of this process.")
      .def(py::init<>())
      .def_readwrite("rank", &Discovery::rank)
      .def_readwrite("size", &Discovery::size)
      .def_readwrite("local_rank", &Discovery::local_rank)
      .def_readwrite("address", &Discovery::address)
      .def_readwrite("port", &Discovery::port)
      .def_readwrite("source", &Discovery::source)
      .def_readwrite("agent_hosts_store", &Discovery::agent_hosts_store);
  module.def("discover_world", &discover_world, py::arg("default_port") = kDefaultPort, NoGil());
  module.def("join_world", &join, py::arg("place"), py::arg("timeout_s") = 300.0, NoGil());
  module.def("make_world", &make_world, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("host") = "",
             NoGil());
  module.def("init_distributed", &discover, py::arg("timeout_s") = 300.0, NoGil());
}

}  // namespace deeptide::python
