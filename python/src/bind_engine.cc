// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Engine, behind a handle that Python can close at a moment of its choosing.
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/engine.h"

namespace deeptide::python {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Owns the engine until close(); a call that runs in another thread keeps it alive until it returns.
class EngineHandle {
 public:
  EngineHandle(const ModelDescription& model, const Config& config, const InitOptions& options)
      : engine_(std::make_shared<Engine>(model, config, options)) {}

  std::shared_ptr<Engine> get() const {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(engine_, "this engine was destroyed; create another with deeptide.initialize()");
    return engine_;
  }
  bool closed() const {
    const std::lock_guard lock(mutex_);
    return !engine_;
  }
  void close() {
    std::shared_ptr<Engine> last;
    const std::lock_guard lock(mutex_);
    last.swap(engine_);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Engine> engine_;
};

using HandlePointer = std::unique_ptr<EngineHandle, DeleteWithoutGil<EngineHandle>>;
using EngineClass = py::class_<EngineHandle, HandlePointer>;

/// Engine's method `method` on the handle's engine.
template <typename Result, typename... Args>
auto forward_to(Result (Engine::*method)(Args...)) {
  return [method](EngineHandle& handle, Args... args) -> Result {
    return ((*handle.get()).*method)(std::forward<Args>(args)...);
  };
}
template <typename Result, typename... Args>
auto forward_to(Result (Engine::*method)(Args...) const) {
  return [method](EngineHandle& handle, Args... args) -> std::decay_t<Result> {
    return ((*handle.get()).*method)(std::forward<Args>(args)...);
  };
}

HandlePointer make_engine(const ModelDescription& model, const Config& config, const InitOptions& options) {
  const py::gil_scoped_release no_gil;
  return HandlePointer(new EngineHandle(model, config, options));
}

std::string save_checkpoint(EngineHandle& handle, const std::string& directory, const std::string& tag,
                            const std::string& client_state_json, bool save_latest, bool exclude_frozen_parameters,
                            std::optional<bool> blocking, std::optional<SaveContents> contents, bool in_handler) {
  return handle.get()->save_checkpoint(directory, tag, client_state_json,
                                       {save_latest, exclude_frozen_parameters, blocking, contents, in_handler});
}

using Loaded = std::optional<std::pair<std::string, std::string>>;

Loaded load_checkpoint(EngineHandle& handle, const std::string& directory, const std::string& tag, bool strict,
                       bool optimizer_states, bool lr_scheduler_states, bool module_only) {
  auto loaded = handle.get()->load_checkpoint(directory, tag,
                                              {.strict = strict,
                                               .optimizer_states = optimizer_states,
                                               .lr_scheduler_states = lr_scheduler_states,
                                               .module_only = module_only});
  if (!loaded) {
    return std::nullopt;
  }
  return std::make_pair(loaded->path, loaded->client_state_json);
}

NamedTensors pairs_of(std::vector<NamedTensor> tensors) {
  NamedTensors state;
  for (auto& [name, tensor] : tensors) state.emplace_back(name, std::move(tensor));
  return state;
}

NamedTensors module_state(EngineHandle& handle, std::optional<int> only_rank) {
  return pairs_of(handle.get()->module_state_dict(only_rank));
}

NamedTensors whole_model(EngineHandle& handle, bool exclude_frozen) {
  return pairs_of(handle.get()->whole_model(exclude_frozen));
}

void rebuild(EngineHandle& handle, const ModelDescription& model, const InitOptions& options) {
  const auto engine = handle.get();
  try {
    engine->rebuild(model, options);
  } catch (...) {
    if (engine->ended()) handle.close();
    throw;
  }
}

std::optional<std::pair<int64_t, at::Tensor>> local_state(EngineHandle& handle, const std::string& parameter,
                                                          const std::string& role) {
  auto state = handle.get()->local_state(parameter, role);
  if (!state) return std::nullopt;
  return std::pair(state->begin, std::move(state->values));
}

void export_safetensors(EngineHandle& handle, const std::string& path, const NamedTensors& more, bool exclude_frozen) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : more) tensors.push_back({name, tensor});
  handle.get()->export_safetensors(path, tensors, exclude_frozen);
}

void offload_states(EngineHandle& handle, bool masters, bool moments, bool gradients, bool to_files,
                    const std::vector<std::string>& folders) {
  const OffloadDevice to = to_files ? OffloadDevice::nvme : OffloadDevice::cpu;
  handle.get()->offload_states(
      {.to = to, .folders = folders, .moments = moments, .masters = masters, .gradients = gradients});
}

using SpillPointer = std::unique_ptr<binding::Spill, DeleteWithoutGil<binding::Spill>>;

SpillPointer make_spill(EngineHandle& handle, const std::vector<std::string>& folders, int num_blocks) {
  return SpillPointer(new binding::Spill(handle.get(), folders, num_blocks));
}

void bind_training(EngineClass& engine) {
  engine.def("backward", forward_to(&Engine::backward), py::arg("loss"), py::arg("retain_graph") = false, NoGil())
      .def("step", forward_to(&Engine::step), NoGil())
      .def("join_step", forward_to(&Engine::join_step), NoGil())
      .def("zero_grad", forward_to(&Engine::zero_grad), NoGil())
      .def(
          "taken_gradient",
          [](EngineHandle& handle, const at::Tensor& parameter) {
            return binding::taken_gradient(*handle.get(), parameter);
          },
          py::arg("parameter"), NoGil())
      .def(
          "why_hidden", [](EngineHandle& handle) { return binding::why_hidden(*handle.get()); }, NoGil())
      .def(
          "show_gradients", [](EngineHandle& handle) { binding::show_gradients(*handle.get()); }, NoGil())
      .def(
          "drop_gradients",
          [](EngineHandle& handle, const std::vector<at::Tensor>& of) {
            return binding::drop_gradients(*handle.get(), of);
          },
          py::arg("of"), NoGil())
      .def("has_gradients", forward_to(&Engine::has_gradients), NoGil())
      .def("is_within_accumulation", forward_to(&Engine::is_within_accumulation), NoGil())
      .def("is_gradient_accumulation_boundary", forward_to(&Engine::is_gradient_accumulation_boundary), NoGil())
      .def("set_gradient_accumulation_boundary", forward_to(&Engine::set_gradient_accumulation_boundary),
           py::arg("boundary"), NoGil())
      .def("loss_scale", forward_to(&Engine::loss_scale), NoGil())
      .def("num_groups", forward_to(&Engine::num_groups), NoGil())
      .def("hyperparameters", forward_to(&Engine::hyperparameters), py::arg("group"), NoGil())
      .def("set_hyperparameters", forward_to(&Engine::set_hyperparameters), py::arg("group"), py::arg("value"), NoGil())
      .def("hyperparameters_version", forward_to(&Engine::hyperparameters_version), NoGil())
      .def("group_parameters", forward_to(&Engine::group_parameters), py::arg("group"), NoGil());
}

void bind_questions(EngineClass& engine) {
  engine.def_property_readonly("closed", &EngineHandle::closed)
      .def("close", &EngineHandle::close, NoGil())
      .def("global_steps", forward_to(&Engine::global_steps), NoGil())
      .def("offload_ratio", forward_to(&Engine::offload_ratio), NoGil())
      .def("skipped_steps", forward_to(&Engine::skipped_steps), NoGil())
      .def("micro_steps", forward_to(&Engine::micro_steps), NoGil())
      .def("global_samples", forward_to(&Engine::global_samples), NoGil())
      .def("batch_sizes", forward_to(&Engine::batch_sizes), NoGil())
      .def("world", forward_to(&Engine::world), NoGil())
      .def("stage", [](EngineHandle& handle) { return make_stage(handle.get()); })
      .def("config", forward_to(&Engine::config), NoGil())
      .def("device", forward_to(&Engine::device), NoGil())
      .def("memory", forward_to(&Engine::memory), NoGil())
      .def("live_gathered_bytes", forward_to(&Engine::live_gathered_bytes), NoGil())
      .def("spill", &make_spill, py::arg("folders"), py::arg("num_blocks"), NoGil())
      .def("peak_gathered_bytes", forward_to(&Engine::peak_gathered_bytes), NoGil())
      .def("summary", forward_to(&Engine::summary), NoGil());
}

void bind_observation(EngineClass& engine) {
  engine.def("begin_forward", forward_to(&Engine::begin_forward), py::arg("tokens") = 0, NoGil())
      .def("step_times", forward_to(&Engine::step_times))
      .def("limit", forward_to(&Engine::limit))
      .def("collectives", forward_to(&Engine::collectives))
      .def("collectives_text", forward_to(&Engine::collectives_text))
      .def("keep_events", forward_to(&Engine::keep_events))
      .def("take_events", forward_to(&Engine::take_events))
      .def("leave_profile_to_program", forward_to(&Engine::leave_profile_to_program));
}

void bind_state(EngineClass& engine) {
  engine
      .def("save_checkpoint", &save_checkpoint, py::arg("directory"), py::arg("tag") = "",
           py::arg("client_state_json") = "{}", py::arg("save_latest") = true,
           py::arg("exclude_frozen_parameters") = false, py::arg("blocking") = std::nullopt,
           py::arg("contents") = std::nullopt, py::arg("in_handler") = false, NoGil())
      .def("should_preempt", forward_to(&Engine::should_preempt), NoGil())
      .def("preempt", forward_to(&Engine::preempt), NoGil())
      .def("wait_for_save", forward_to(&Engine::wait_for_save), NoGil())
      .def("load_checkpoint", &load_checkpoint, py::arg("directory"), py::arg("tag") = "", py::kw_only(),
           py::arg("strict") = true, py::arg("optimizer_states") = true, py::arg("lr_scheduler_states") = true,
           py::arg("module_only") = false, NoGil())
      .def("module_state_dict", &module_state, py::arg("only_rank") = std::nullopt, NoGil())
      .def("export_safetensors", &export_safetensors, py::arg("path"), py::arg("more") = NamedTensors(),
           py::arg("exclude_frozen") = false, NoGil())
      .def("whole_model", &whole_model, py::arg("exclude_frozen") = false, NoGil())
      .def("full_state", forward_to(&Engine::full_state), py::arg("parameter"), py::arg("role"), NoGil())
      .def("set_full_state", forward_to(&Engine::set_full_state), py::arg("parameter"), py::arg("role"),
           py::arg("value"), NoGil())
      .def("broadcast", forward_to(&Engine::broadcast), py::arg("values"), py::arg("source"), NoGil())
      .def("mean", forward_to(&Engine::mean), py::arg("value"), NoGil())
      .def("local_state", &local_state, py::arg("parameter"), py::arg("role"), NoGil())
      .def("set_local_state", forward_to(&Engine::set_local_state), py::arg("parameter"), py::arg("role"),
           py::arg("values"), NoGil())
      .def("rebuild", &rebuild, py::arg("model"), py::arg("options"), NoGil())
      .def("report_error", forward_to(&Engine::report_error), py::arg("event"), py::arg("text"), NoGil())
      .def("withdraw_error", forward_to(&Engine::withdraw_error), NoGil())
      .def("let_others_end", forward_to(&Engine::let_others_end), py::arg("seconds"), NoGil())
      .def("expect_model_changes", forward_to(&Engine::expect_model_changes), NoGil())
      .def("offload_states", &offload_states, py::kw_only(), py::arg("masters"), py::arg("moments"),
           py::arg("gradients"), py::arg("to_files"), py::arg("folders"), NoGil())
      .def("reload_states", forward_to(&Engine::reload_states), NoGil())
      .def("empty_partition_cache", forward_to(&Engine::empty_partition_cache), NoGil());
}

}  // namespace

void bind_engine(py::module_& module) {
  py::enum_<binding::TakenGradient>(module, "TakenGradient", "Of a gradient that the engine has, while .grad is None.")
      .value("none", binding::TakenGradient::none)
      .value("showable", binding::TakenGradient::showable)
      .value("hidden", binding::TakenGradient::hidden);
  EngineClass engine(module, "Engine", "The C++ engine; deeptide.Engine is what users hold.");
  engine.def(py::init(&make_engine), py::arg("model"), py::arg("config"), py::arg("options"));
  bind_training(engine);
  bind_questions(engine);
  bind_observation(engine);
  bind_state(engine);
}

}  // namespace deeptide::python
