// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checkpoints as folders: the reader, and what is done with it.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "deeptide/checkpoint.h"

namespace deeptide::python {
namespace {

using Progress = std::optional<CheckpointProgress>;  // pybind11 takes the GIL to call a Python function in one

std::vector<std::string> export_whole(const CheckpointReader& reader, const std::string& folder, ExportFormat format,
                                      const std::string& dtype, const std::string& max_shard_size, bool exclude_frozen,
                                      const Progress& progress) {
  ExportOptions options{
      .format = format, .dtype = dtype, .max_shard_size = max_shard_size, .exclude_frozen = exclude_frozen};
  return export_checkpoint(reader, folder, options, progress.value_or(CheckpointProgress()));
}

std::vector<std::string> verify(const std::string& directory, const std::string& tag, const Progress& progress) {
  return verify_checkpoint(directory, tag, progress.value_or(CheckpointProgress()));
}

std::vector<CheckpointDifference> compare(const CheckpointReader& first, const CheckpointReader& second,
                                          const Progress& progress) {
  return compare_checkpoints(first, second, progress.value_or(CheckpointProgress()));
}

std::vector<std::string> prune(const std::string& directory, int64_t keep_last, int64_t keep_every, bool dry_run) {
  return prune_checkpoints(directory, {.keep_last = keep_last, .keep_every = keep_every, .dry_run = dry_run});
}

at::Tensor read(const CheckpointReader& reader, const CheckpointTensor& tensor) { return reader.read(tensor); }

at::Tensor read_range(const CheckpointReader& reader, const CheckpointTensor& tensor, int64_t begin, int64_t end) {
  return reader.read(tensor, begin, end);
}

void bind_records(py::module_& module) {
  py::enum_<ExportFormat>(module, "ExportFormat", "The layout of an export.")
      .value("safetensors", ExportFormat::safetensors)
      .value("state_dict", ExportFormat::state_dict)
      .value("universal", ExportFormat::universal)
      .value("dcp", ExportFormat::dcp);
  py::class_<CheckpointTensor>(module, "CheckpointTensor", "A tensor of a checkpoint, whole.")
      .def_readonly("name", &CheckpointTensor::name)
      .def_readonly("role", &CheckpointTensor::role)
      .def_readonly("shape", &CheckpointTensor::shape)
      .def_readonly("dtype", &CheckpointTensor::dtype)
      .def_readonly("numel", &CheckpointTensor::numel)
      .def_readonly("bytes", &CheckpointTensor::bytes);
  py::class_<CheckpointStatistics>(module, "CheckpointStatistics", "What a tensor's finite elements are like.")
      .def_readonly("least", &CheckpointStatistics::least)
      .def_readonly("most", &CheckpointStatistics::most)
      .def_readonly("mean", &CheckpointStatistics::mean)
      .def_readonly("norm", &CheckpointStatistics::norm)
      .def_readonly("num_finite", &CheckpointStatistics::num_finite)
      .def_readonly("num_others", &CheckpointStatistics::num_others)
      .def_readonly("first", &CheckpointStatistics::first);
  py::class_<CheckpointSummary>(module, "CheckpointSummary", "A checkpoint in a folder of them.")
      .def_readonly("tag", &CheckpointSummary::tag)
      .def_readonly("is_latest", &CheckpointSummary::is_latest)
      .def_readonly("global_steps", &CheckpointSummary::global_steps)
      .def_readonly("world_size", &CheckpointSummary::world_size)
      .def_readonly("num_tensors", &CheckpointSummary::num_tensors)
      .def_readonly("bytes", &CheckpointSummary::bytes)
      .def_readonly("saved_at_s", &CheckpointSummary::saved_at_s)
      .def_readonly("has_hashes", &CheckpointSummary::has_hashes)
      .def_readonly("fault", &CheckpointSummary::fault);
  py::class_<CheckpointDifference>(module, "CheckpointDifference", "What differs in one tensor.")
      .def_readonly("name", &CheckpointDifference::name)
      .def_readonly("role", &CheckpointDifference::role)
      .def_property_readonly("kind", [](const CheckpointDifference& difference) { return name_of(difference.kind); })
      .def_readonly("first", &CheckpointDifference::first)
      .def_readonly("second", &CheckpointDifference::second)
      .def_readonly("num_different", &CheckpointDifference::num_different)
      .def_readonly("max_difference", &CheckpointDifference::max_difference);
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_records(module);
  py::class_<CheckpointReader>(module, "CheckpointReader", "A checkpoint of any number of ranks, read without them.")
      .def(py::init(&CheckpointReader::open), py::arg("directory"), py::arg("tag") = "", NoGil())
      .def_property_readonly("folder", &CheckpointReader::folder)
      .def_property_readonly("world_size", &CheckpointReader::world_size)
      .def_property_readonly("global_steps", &CheckpointReader::global_steps)
      .def_property_readonly("state_json", &CheckpointReader::state_json)
      .def_property_readonly("client_state_json", &CheckpointReader::client_state_json)
      .def_property_readonly("tensors", &CheckpointReader::tensors)
      .def("find", &CheckpointReader::find, py::arg("name"), py::arg("role") = "")
      .def("read", &read, py::arg("tensor"), NoGil())
      .def("read_range", &read_range, py::arg("tensor"), py::arg("begin"), py::arg("end"), NoGil());
  module.def("checkpoint_statistics", &checkpoint_statistics, py::arg("reader"), py::arg("tensor"), NoGil());
  module.def("list_checkpoints", &list_checkpoints, py::arg("directory"), NoGil());
  module.def("verify_checkpoint", &verify, py::arg("directory"), py::arg("tag"), py::arg("progress"), NoGil());
  module.def("compare_checkpoints", &compare, py::arg("first"), py::arg("second"), py::arg("progress"), NoGil());
  module.def("param_groups_json", &param_groups_json, py::arg("reader"), NoGil());
  module.def("export_checkpoint", &export_whole, py::arg("reader"), py::arg("folder"), py::arg("format"),
             py::arg("dtype"), py::arg("max_shard_size"), py::arg("exclude_frozen"), py::arg("progress"), NoGil());
  module.def("prune_checkpoints", &prune, py::arg("directory"), py::arg("keep_last"), py::arg("keep_every"),
             py::arg("dry_run"), NoGil());
}

}  // namespace deeptide::python
