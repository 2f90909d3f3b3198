// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// PipelineStage, which does not keep the engine that it belongs to alive.
#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"
#include "deeptide/pipeline_stage.h"

namespace deeptide::python {
namespace {

class StageHandle {
 public:
  explicit StageHandle(const std::shared_ptr<Engine>& engine) : engine_(engine) {
    static_cast<void>(PipelineStage(*engine));
  }

  /// Calls `method` of the stage while the engine lives.
  template <typename Result, typename... Args>
  static auto forward_to(Result (PipelineStage::*method)(Args...)) {
    return [method](const StageHandle& handle, Args... args) -> Result {
      const auto engine = handle.get();
      return (PipelineStage(*engine).*method)(std::forward<Args>(args)...);
    };
  }
  template <typename Result, typename... Args>
  static auto forward_to(Result (PipelineStage::*method)(Args...) const) {
    return [method](const StageHandle& handle, Args... args) -> Result {
      const auto engine = handle.get();
      return (PipelineStage(*engine).*method)(std::forward<Args>(args)...);
    };
  }

 private:
  std::shared_ptr<Engine> get() const {
    auto engine = engine_.lock();
    TORCH_CHECK(engine, "this engine was destroyed; create another with deeptide.initialize()");
    return engine;
  }

  std::weak_ptr<Engine> engine_;
};

}  // namespace

py::object make_stage(const std::shared_ptr<Engine>& engine) { return py::cast(StageHandle(engine)); }

void bind_stage(py::module_& module) {
  module.def(
      "stage_of_rank",
      [](int rank, int stages, int ranks) {
        pipeline_axes(stages, ranks);  // which refuses what cannot be
        return rank / (ranks / stages);
      },
      py::arg("rank"), py::arg("stages"), py::arg("ranks"));
  py::class_<StageHandle>(module, "PipelineStage", "What one stage's engine exchanges with the other stages.")
      .def_property_readonly("index", StageHandle::forward_to(&PipelineStage::index))
      .def_property_readonly("num_stages", StageHandle::forward_to(&PipelineStage::num_stages))
      .def_property_readonly("data_rank", StageHandle::forward_to(&PipelineStage::data_rank))
      .def_property_readonly("data_size", StageHandle::forward_to(&PipelineStage::data_size))
      .def("send", StageHandle::forward_to(&PipelineStage::send), py::arg("tensor"), py::arg("stage"), NoGil())
      .def("expect", StageHandle::forward_to(&PipelineStage::expect), py::arg("tensor"), py::arg("stage"), NoGil())
      .def("receive", StageHandle::forward_to(&PipelineStage::receive), py::arg("letter"), NoGil())
      .def("flush", StageHandle::forward_to(&PipelineStage::flush), NoGil())
      .def("backward", StageHandle::forward_to(&PipelineStage::backward), py::arg("outputs"), py::arg("gradients"),
           NoGil())
      .def("hold", StageHandle::forward_to(&PipelineStage::hold), py::arg("number"), NoGil())
      .def("give", StageHandle::forward_to(&PipelineStage::give), py::arg("number"), NoGil())
      .def("add_product", StageHandle::forward_to(&PipelineStage::add_product), py::arg("weight"), py::arg("left"),
           py::arg("right"), NoGil())
      .def("join", StageHandle::forward_to(&PipelineStage::join), py::arg("parameter"), py::arg("sum"), NoGil())
      .def("take_joining", StageHandle::forward_to(&PipelineStage::take_joining), NoGil())
      .def("note_backward", StageHandle::forward_to(&PipelineStage::note_backward))
      .def("lose_step", StageHandle::forward_to(&PipelineStage::lose_step), py::arg("why"), NoGil())
      .def("begin_step", StageHandle::forward_to(&PipelineStage::begin_step), NoGil())
      .def("meet", StageHandle::forward_to(&PipelineStage::meet), NoGil())
      .def("exchange", StageHandle::forward_to(&PipelineStage::exchange), py::arg("values"),
           py::arg("what") = "exchanging numbers with the other stages", NoGil());
}

}  // namespace deeptide::python
