// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// World: rank, size and the store, made from torch.distributed's objects or from the environment.
#include <pybind11/functional.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/world.h"

namespace deeptide::python {
namespace {

/// The part of a channel's name that is the same for every engine: "gathers" of "2/gathers".
std::string kind_of(const std::string& channel) { return channel.substr(channel.rfind('/') + 1); }

// By name: the group's Python object and ours need not agree on how they hold it.
void use_group(World& world, const std::string& name, c10::Device device) {
  auto backend = c10d::resolve_process_group(name)->getBackend(device.type());
  world.make_backend = [backend, size = world.size](const std::vector<int>& ranks, const std::string& channel) {
    if (static_cast<int>(ranks.size()) == size) return backend;
    throw ConfigError("the process group carries all " + std::to_string(size) + " ranks; channel '" + channel +
                      "' is of " + std::to_string(ranks.size()));
  };
}

/// Returns the name of the group among those ranks that carries channels of this kind. Collective over the ranks.
using FindGroup = std::function<std::string(const std::vector<int>& ranks, const std::string& kind)>;

void use_groups(World& world, FindGroup find, c10::Device device) {
  world.make_backend = [find = std::move(find), type = device.type()](const std::vector<int>& ranks,
                                                                      const std::string& channel) {
    return c10d::resolve_process_group(find(ranks, kind_of(channel)))->getBackend(type);
  };
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void set_timeout(DistributedOptions& options, double seconds) { options.timeout = milliseconds_of(seconds); }

double timeout_s(const DistributedOptions& options) {
  return static_cast<double>(binding::timeout_of(options).count()) / 1000;
}

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
      .def("use_groups", &use_groups, py::arg("find"), py::arg("device"))
      .def("__repr__", &describe_world);
  py::class_<Discovery>(module, "Discovery", "Where this process stands in its world.")
      .def(py::init<>())
      .def_readonly("rank", &Discovery::rank)
      .def_readonly("size", &Discovery::size)
      .def_readonly("local_rank", &Discovery::local_rank)
      .def_readonly("address", &Discovery::address)
      .def_readonly("port", &Discovery::port)
      .def_readonly("source", &Discovery::source)
      .def_readonly("file", &Discovery::file);
  py::class_<DistributedOptions>(module, "DistributedOptions", "What a program may say of its world.")
      .def(py::init<>())
      .def_readwrite("auto_mpi_discovery", &DistributedOptions::auto_mpi_discovery)
      .def_readwrite("distributed_port", &DistributedOptions::distributed_port)
      .def_readwrite("verbose", &DistributedOptions::verbose)
      .def_readwrite("init_method", &DistributedOptions::init_method)
      .def_readwrite("dist_init_required", &DistributedOptions::dist_init_required)
      .def_readwrite("rank", &DistributedOptions::rank)
      .def_readwrite("world_size", &DistributedOptions::world_size)
      .def_property("timeout_s", &timeout_s, &set_timeout);
  module.attr("DEFAULT_PORT") = kDefaultPort;
  module.def("find_place", &binding::find_place, py::arg("options"), NoGil());
  module.def("join_world", &join, py::arg("place"), py::arg("timeout_s") = 300.0, NoGil());
  module.def("make_world", &make_world, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("host") = "",
             NoGil());
  module.def("init_distributed", &init_distributed, py::arg("options") = DistributedOptions{}, NoGil());
}

}  // namespace deeptide::python
