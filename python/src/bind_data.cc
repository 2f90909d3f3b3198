// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// DistributedSampler: which samples a rank sees.
#include "bindings.h"
#include "deeptide/data.h"

namespace deeptide::python {
namespace {

DistributedSampler make_sampler(int64_t num_samples, int64_t batch_size, int rank, int world_size, bool shuffle,
                                bool drop_last, uint64_t seed) {
  return DistributedSampler(num_samples, {.batch_size = batch_size,
                                          .rank = rank,
                                          .world_size = world_size,
                                          .shuffle = shuffle,
                                          .drop_last = drop_last,
                                          .seed = seed});
}

std::pair<int64_t, int64_t> position(const DistributedSampler& sampler) {
  const auto at = sampler.position();
  return {at.epoch, at.batch};
}

}  // namespace

void bind_data(py::module_& module) {
  py::class_<DistributedSampler>(module, "DistributedSampler", "Deals a rank's batches of indices, epoch by epoch.")
      .def(py::init(&make_sampler), py::arg("num_samples"), py::kw_only(), py::arg("batch_size") = 1,
           py::arg("rank") = 0, py::arg("world_size") = 1, py::arg("shuffle") = true, py::arg("drop_last") = false,
           py::arg("seed") = 0)
      .def("batches_per_epoch", &DistributedSampler::batches_per_epoch)
      .def("next", &DistributedSampler::next)
      .def("position", &position)
      .def(
          "set_position",
          [](DistributedSampler& sampler, int64_t epoch, int64_t batch) {
            sampler.set_position({.epoch = epoch, .batch = batch});
          },
          py::arg("epoch"), py::arg("batch"))
      .def("permute", &DistributedSampler::permute, py::arg("epoch"), py::arg("index"))
      .def("__len__", &DistributedSampler::batches_per_epoch);
}

}  // namespace deeptide::python
