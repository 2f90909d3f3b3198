// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Config and its sections, read-only in Python.
#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/config.h"

namespace deeptide::python {
namespace {

/// The schedule as Python shows it: parameters by their names in the text, flags as 0 and 1.
struct Scheduler {
  std::string type;
  std::map<std::string, double> params;
  std::map<std::string, std::string> names;
};

Scheduler scheduler_of(const Config& config) {
  auto [numbers, words] = binding::scheduler_parameters(config);
  return {std::string(scheduler_type(config.scheduler())), std::move(numbers), std::move(words)};
}

void bind_enums(py::module_& module) {
  py::enum_<SaveContents>(module, "SaveContents")
      .value("all", SaveContents::all)
      .value("trainable", SaveContents::trainable)
      .value("weights", SaveContents::weights);
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
      .def_readonly("defaults", &OptimizerConfig::defaults)
      .def_readonly("rest", &OptimizerConfig::rest);
  py::class_<Scheduler>(module, "SchedulerConfig")
      .def_readonly("type", &Scheduler::type)
      .def_readonly("params", &Scheduler::params)
      .def_readonly("names", &Scheduler::names);
  py::class_<ZeroConfig>(module, "ZeroConfig")
      .def_readonly("stage", &ZeroConfig::stage)
      .def_readonly("overlap_comm", &ZeroConfig::overlap_comm)
      .def_readonly("reduce_bucket_size", &ZeroConfig::reduce_bucket_size)
      .def_readonly("allgather_bucket_size", &ZeroConfig::allgather_bucket_size)
      .def_readonly("gather_16bit_weights_on_model_save", &ZeroConfig::gather_16bit_weights_on_model_save)
      .def_readonly("allow_untested_optimizer", &ZeroConfig::allow_untested_optimizer);
  py::class_<CheckpointConfig>(module, "CheckpointConfig")
      .def_readonly("preempt_folder", &CheckpointConfig::preempt_folder)
      .def_readonly("preempt_exit_code", &CheckpointConfig::preempt_exit_code);
  py::class_<RuntimeConfig>(module, "RuntimeConfig")
      .def_readonly("comm_timeout_s", &RuntimeConfig::comm_timeout_s)
      .def_readonly("error_grace_s", &RuntimeConfig::error_grace_s)
      .def_readonly("seed", &RuntimeConfig::seed);
}

// Returns (batch, valid worlds, largest micro-batch, preferred micro-batch, version).
py::tuple elastic_batch(const Config& config, int64_t world_size) {
  const ElasticBatch batch = binding::elastic_batch(config.elasticity(), world_size);
  return py::make_tuple(batch.train, batch.valid_worlds, batch.micro, batch.preferred_micro,
                        config.elasticity().version);
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
      .def("without_scheduler", &Config::without_scheduler)
      .def("merged", &Config::with, py::arg("patch"))
      .def_property_readonly("optimizer", &Config::optimizer)
      .def_property_readonly("scheduler", &scheduler_of)
      .def_property_readonly("zero", &Config::zero)
      .def_property_readonly("checkpoint", &Config::checkpoint)
      .def_property_readonly("runtime", &Config::runtime)
      .def_property_readonly("fp16", [](const Config& config) { return config.precision().fp16; })
      .def_property_readonly("autocast",
                             [](const Config& config) -> std::optional<DataType> {
                               if (!config.precision().autocast) return std::nullopt;
                               return config.precision().autocast_dtype;
                             })
      .def_property_readonly("auto_cast", [](const Config& config) { return config.precision().auto_cast; })
      .def_property_readonly("loss_scale", [](const Config& config) { return config.precision().loss_scale; })
      .def_property_readonly("bf16", [](const Config& config) { return config.precision().bf16; })
      .def_property_readonly("gradient_clipping", [](const Config& config) { return config.gradients().clipping; })
      .def_property_readonly("steps_per_print", [](const Config& config) { return config.report().steps_per_print; })
      .def_property_readonly("wall_clock_breakdown",
                             [](const Config& config) { return config.report().wall_clock_breakdown; })
      .def_property_readonly("memory_breakdown", [](const Config& config) { return config.report().memory_breakdown; })
      .def_property_readonly("comms_logger", [](const Config& config) { return config.comms_logger().enabled; })
      .def_property_readonly("flops_profiler", &Config::flops_profiler)
      .def_property_readonly("tensorboard", &Config::tensorboard)
      .def_property_readonly("wandb", &Config::wandb)
      .def_property_readonly("comet", &Config::comet)
      .def_property_readonly("csv_monitor", &Config::csv_monitor)
      .def_property_readonly("dataloader_drop_last", [](const Config& config) { return config.data().drop_last; })
      .def_property_readonly("origin", &Config::origin)
      .def_property_readonly("text", &Config::text)
      .def_property_readonly("decisions", &Config::decisions)
      .def("__repr__", [](const Config& config) { return "<deeptide.Config from " + config.origin() + ">"; });
  module.def("config_json_schema", &config_json_schema);
}

}  // namespace deeptide::python
