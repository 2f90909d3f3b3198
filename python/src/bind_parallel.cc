// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Schedules of pipelines and their simulator.
#include <pybind11/stl.h>

#include "bindings.h"
#include "deeptide/pipeline_partition.h"
#include "deeptide/pipeline_schedule.h"

namespace deeptide::python {
namespace {

void bind_instructions(py::module_& module) {
  py::enum_<PipelineSchedule>(module, "PipelineSchedule", "The order of a pipeline's forwards and backwards.")
      .value("gpipe", PipelineSchedule::gpipe)
      .value("one_f_one_b", PipelineSchedule::one_f_one_b)
      .value("interleaved", PipelineSchedule::interleaved)
      .value("zero_bubble", PipelineSchedule::zero_bubble);
  py::enum_<StageAction>(module, "StageAction", "What an instruction of a stage does.")
      .value("receive_activation", StageAction::receive_activation)
      .value("forward", StageAction::forward)
      .value("send_activation", StageAction::send_activation)
      .value("receive_gradient", StageAction::receive_gradient)
      .value("backward", StageAction::backward)
      .value("backward_input", StageAction::backward_input)
      .value("backward_weight", StageAction::backward_weight)
      .value("send_gradient", StageAction::send_gradient);
  py::class_<StageInstruction>(module, "StageInstruction", "One thing that a stage of a pipeline does.")
      .def(py::init([](StageAction action, int micro_batch, int chunk) {
             return StageInstruction{.action = action, .chunk = chunk, .micro_batch = micro_batch};
           }),
           py::arg("action"), py::arg("micro_batch"), py::arg("chunk") = 0)
      .def_readonly("action", &StageInstruction::action)
      .def_readonly("micro_batch", &StageInstruction::micro_batch)
      .def_readonly("chunk", &StageInstruction::chunk)
      .def("__str__", [](const StageInstruction& instruction) { return text(instruction); });
}

void bind_simulator(py::module_& module) {
  py::class_<StageCosts>(module, "StageCosts", "Times of a whole stage and one micro-batch, and of a transfer.")
      .def(py::init([](double forward, double backward_input, double backward_weight, double transfer) {
             return StageCosts{.forward = forward,
                               .backward_input = backward_input,
                               .backward_weight = backward_weight,
                               .transfer = transfer};
           }),
           py::arg("forward") = 1.0, py::arg("backward_input") = 1.0, py::arg("backward_weight") = 1.0,
           py::arg("transfer") = 0.0)
      .def_readonly("forward", &StageCosts::forward)
      .def_readonly("backward_input", &StageCosts::backward_input)
      .def_readonly("backward_weight", &StageCosts::backward_weight)
      .def_readonly("transfer", &StageCosts::transfer);
  py::class_<SimulatedStep>(module, "SimulatedStep", "One step of a pipeline on paper.")
      .def_readonly("time", &SimulatedStep::time)
      .def_readonly("idle", &SimulatedStep::idle)
      .def_readonly("peak_activations", &SimulatedStep::peak_activations)
      .def_property_readonly("bubble", &SimulatedStep::bubble);
  module.def(
      "simulate_pipeline",
      [](const std::vector<std::vector<StageInstruction>>& instructions, int micro_batches, const StageCosts& costs,
         int chunks) {
        const auto stages = static_cast<int>(instructions.size());
        return simulate(instructions, {.stages = stages, .micro_batches = micro_batches, .chunks = chunks}, costs);
      },
      py::arg("instructions"), py::arg("micro_batches"), py::arg("costs"), py::arg("chunks") = 1, NoGil());
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_instructions(module);
  bind_simulator(module);
  module.def(
      "stage_instructions",
      [](PipelineSchedule schedule, int stages, int micro_batches, int stage, int chunks) {
        return stage_instructions(schedule, {.stages = stages, .micro_batches = micro_batches, .chunks = chunks},
                                  stage);
      },
      py::arg("schedule"), py::arg("stages"), py::arg("micro_batches"), py::arg("stage"), py::arg("chunks") = 1);
  module.def(
      "published_idle_time",
      [](PipelineSchedule schedule, int stages, int micro_batches, const StageCosts& costs, int chunks) {
        return published_idle_time(schedule, {.stages = stages, .micro_batches = micro_batches, .chunks = chunks},
                                   costs);
      },
      py::arg("schedule"), py::arg("stages"), py::arg("micro_batches"), py::arg("costs"), py::arg("chunks") = 1);
  module.def(
      "published_peak_activations",
      [](PipelineSchedule schedule, int stages, int micro_batches, int stage, int chunks) {
        return published_peak_activations(schedule,
                                          {.stages = stages, .micro_batches = micro_batches, .chunks = chunks}, stage);
      },
      py::arg("schedule"), py::arg("stages"), py::arg("micro_batches"), py::arg("stage"), py::arg("chunks") = 1);
  module.def("uniform_bounds", &uniform_bounds, py::arg("num_items"), py::arg("num_parts"));
  module.def("balanced_bounds", &balanced_bounds, py::arg("weights"), py::arg("num_parts"));
  module.def("bounds_by_time", &bounds_by_time, py::arg("times"), py::arg("num_parts"));
  module.def("bounds_by_memory", &bounds_by_memory, py::arg("states"), py::arg("kept"), py::arg("stages"),
             py::arg("chunks"));
}

}  // namespace deeptide::python
