// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Config and the values it is made of, read-only in Python.
#include "bindings.h"
#include "config/elasticity.h"
#include "deeptide/config.h"

namespace deeptide::python {
namespace {

void bind_enums(py::module_& module) {
  py::enum_<DataType>(module, "DataType")
      .value("fp32", DataType::fp32)
      .value("fp16", DataType::fp16)
      .value("bf16", DataType::bf16);
}

void bind_sections(py::module_& module) {
  py::class_<BatchSizes>(module, "BatchSizes")
      .def_readonly("train", &BatchSizes::train)
      .def_readonly("micro", &BatchSizes::micro)
      .def_readonly("accumulation", &BatchSizes::accumulation);
  py::class_<OptimizerConfig>(module, "OptimizerConfig")
      .def_readonly("type", &OptimizerConfig::type)
      .def_readonly("defaults", &OptimizerConfig::defaults);
  py::class_<SchedulerConfig>(module, "SchedulerConfig")
      .def_readonly("type", &SchedulerConfig::type)
      .def_readonly("params", &SchedulerConfig::params)
      .def_readonly("names", &SchedulerConfig::names);
  py::class_<ZeroConfig>(module, "ZeroConfig")
      .def_readonly("stage", &ZeroConfig::stage)
      .def_readonly("overlap_comm", &ZeroConfig::overlap_comm)
      .def_readonly("reduce_bucket_size", &ZeroConfig::reduce_bucket_size)
      .def_readonly("allgather_bucket_size", &ZeroConfig::allgather_bucket_size)
      .def_readonly("gather_16bit_weights_on_model_save", &ZeroConfig::gather_16bit_weights_on_model_save);
  py::class_<RuntimeConfig>(module, "RuntimeConfig")
      .def_readonly("comm_timeout_s", &RuntimeConfig::comm_timeout_s)
      .def_readonly("seed", &RuntimeConfig::seed);
}

// Batch, valid worlds, largest micro-batch, preferred micro-batch, version.
py::tuple elastic_batch(const Config& config, int64_t world_size) {
  const config::ElasticBatch batch = config::elastic_batch_unchecked(config.elasticity, world_size);
  return py::make_tuple(batch.train, batch.valid_worlds, batch.micro, batch.preferred_micro, config.elasticity.version);
}

}  // namespace

void bind_config(py::module_& module) {
  bind_enums(module);
  bind_sections(module);
  module.def("elastic_batch", &elastic_batch, py::arg("config"), py::arg("world_size"));
  py::class_<Config>(module, "Config", "A parsed and validated ds_config.json.")
      .def_static("from_file", &Config::from_file, py::arg("path"), NoGil())
      .def_static("from_text", &Config::from_text, py::arg("text"), py::arg("origin") = "<text>", NoGil())
      .def("batch_sizes", &Config::batch_sizes, py::arg("world_size"))
      .def("compute_dtype", &Config::compute_dtype)
      .def("without_scheduler",
           [](const Config& config) {
             Config copy = config;
             copy.scheduler = {};
             copy.decisions.emplace_back("scheduler: the caller's lr_scheduler replaces the configuration's");
             return copy;
           })
      .def_readonly("optimizer", &Config::optimizer)
      .def_readonly("scheduler", &Config::scheduler)
      .def_readonly("zero", &Config::zero)
      .def_readonly("runtime", &Config::runtime)
      .def_readonly("fp16", &Config::fp16)
      .def_readonly("bf16", &Config::bf16)
      .def_readonly("gradient_clipping", &Config::gradient_clipping)
      .def_readonly("steps_per_print", &Config::steps_per_print)
      .def_readonly("dataloader_drop_last", &Config::dataloader_drop_last)
      .def_readonly("origin", &Config::origin)
      .def_readonly("text", &Config::text)
      .def_readonly("decisions", &Config::decisions)
      .def("__repr__", [](const Config& config) { return "<deeptide.Config from " + config.origin + ">"; });
  module.def("config_json_schema", &config_json_schema);
}

}  // namespace deeptide::python
