// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Forwards every public method to the parts of the engine.
#include "deeptide/engine.h"

#include <filesystem>

#include "deeptide/compression.h"
#include "deferred/recorder.h"
#include "engine/design/optimizer_groups.h"
#include "engine/engine_impl.h"

namespace deeptide {

Engine::Engine(const ModelDescription& model, const Config& config, const InitOptions& options)
    : impl_([&] {
        const deferred::Pause pause(deferred::kKey);  // the program may still be inside zero.Init
        return std::make_unique<Impl>(model, config, options);
      }()) {}
Engine::~Engine() { drop(); }
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&& other) noexcept {
  if (this != &other) {
    drop();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

/// A forked child has the engine's memory but none of its threads: it leaves all of it alone.
void Engine::drop() {
  if (impl_ && !impl_->is_ours()) static_cast<void>(impl_.release());
  impl_.reset();
}

void Engine::Impl::check_process(const char* method) const {
  TORCH_CHECK_VALUE(is_ours(), method, ": process ", ::getpid(), " was forked from process ", process,
                    ", whose engine this is; take engine.snapshot() before the fork, and use that copy here");
}

void Engine::backward(const at::Tensor& loss, bool retain_graph) {
  impl_->told("backward", [&] {
    const auto& compression = impl_->stepper->compression();
    if (compression && impl_->stepper->is_boundary()) {
      compression->before_backward(loss, [&](double value) { return impl_->mean(value); });
    }
    impl_->explain_memory("backward()", [&] { impl_->stepper->backward(loss, retain_graph); });
  });
}
StepOutcome Engine::step() {
  std::optional<StepOutcome> outcome;
  impl_->told("step",
              [&] { impl_->explain_memory("step()", [&] { outcome = impl_->stepper->step(/*joined=*/false); }); });
  return std::move(*outcome);
}
void Engine::join() {
  while (join_step()) {
  }
}
std::optional<StepOutcome> Engine::join_step() {
  return impl_->told("join", [&] { return impl_->stepper->step(/*joined=*/true); });
}
void Engine::zero_grad() {
  impl_->told("zero_grad", [&] { impl_->stepper->zero_grad(); });
}

bool Engine::has_gradients() const { return impl_->has_gradients(); }
bool Engine::is_within_accumulation() const { return impl_->is_within_accumulation(); }
bool Engine::is_gradient_accumulation_boundary() const { return impl_->stepper->is_boundary(); }
void Engine::set_gradient_accumulation_boundary(std::optional<bool> boundary) {
  impl_->stepper->set_boundary(boundary);
}
std::optional<double> Engine::offload_ratio() const {
  const double ratio = impl_->progress.offload_ratio;
  return ratio < 0.0 ? std::nullopt : std::optional(ratio);
}
int64_t Engine::global_steps() const { return impl_->progress.global_steps; }
int64_t Engine::skipped_steps() const { return impl_->progress.skipped_steps; }
int64_t Engine::micro_steps() const { return impl_->progress.micro_steps; }
int64_t Engine::global_samples() const { return impl_->progress.global_samples; }
BatchSizes Engine::batch_sizes() const { return impl_->batch; }
const World& Engine::world() const { return impl_->channels.world(); }
const Config& Engine::config() const { return impl_->config; }
at::Device Engine::device() const { return impl_->model.device(); }

void Engine::begin_forward(int64_t tokens) {
  impl_->model.check_sizes();
  impl_->last.note_forward();
  impl_->reporter.begin_forward(tokens, impl_->progress.global_steps);
}
StepTimes Engine::step_times() const { return impl_->reporter.last_times(); }
std::string Engine::limit() const { return impl_->reporter.limit(); }
std::vector<CollectiveLine> Engine::collectives() const { return impl_->reporter.collectives(); }
std::string Engine::collectives_text() const { return impl_->reporter.collectives_text(); }
void Engine::keep_events() { impl_->reporter.keep_events(); }
std::vector<MonitorEvent> Engine::take_events() { return impl_->reporter.take_events(); }
void Engine::leave_profile_to_program() { impl_->reporter.leave_profile_to_program(); }

double Engine::loss_scale() const { return impl_->stepper->loss_scale(); }

int64_t Engine::num_groups() const { return static_cast<int64_t>(impl_->progress.hyperparameters.size()); }
Hyperparameters Engine::hyperparameters(int64_t group) const { return impl_->progress.hyperparameters.at(group); }
void Engine::set_hyperparameters(int64_t group, const Hyperparameters& value) {
  Hyperparameters& own = impl_->progress.hyperparameters.at(group);
  engine::check_hyperparameters(value, own.optimizer());
  own = value;
}

int64_t Engine::hyperparameters_version() const { return impl_->stepper->hyperparameters_version(); }

std::vector<std::string> Engine::group_parameters(int64_t group) const {
  std::vector<std::string> names;
  for (const auto* p : impl_->model.parameters()) {
    if (p->group == group) names.push_back(p->name);
  }
  return names;
}

std::string Engine::save_checkpoint(const std::string& directory, const std::string& tag,
                                    const std::string& client_state_json, bool save_latest,
                                    bool exclude_frozen_parameters) {
  return save_checkpoint(directory, tag, client_state_json,
                         {.save_latest = save_latest, .exclude_frozen_parameters = exclude_frozen_parameters});
}
std::string Engine::save_checkpoint(const std::string& directory, const std::string& tag,
                                    const std::string& client_state_json, const SaveOptions& options) {
  // A thread may write long after the program has changed its folder.
  const std::string folder = directory.empty() ? directory : std::filesystem::absolute(directory).string();
  SaveOptions now = options;
  now.in_handler = options.in_handler || std::current_exception() != nullptr;
  return impl_->told("save_checkpoint", [&] { return impl_->save_checkpoint(folder, tag, client_state_json, now); });
}
bool Engine::should_preempt() { return impl_->preemption->is_pressing(); }
void Engine::preempt() {
  impl_->told("preempt", [&] { impl_->stepper->preempt(); });
}
std::string Engine::wait_for_save() {
  return impl_->told("wait_for_save", [&] {
    impl_->boundary->enter(comm::Call::wait_for_save);
    impl_->saver->finish();
    const auto result = impl_->saver->take_result();
    if (result && !result->error.empty()) throw CheckpointError(result->path + " was not saved: " + result->error);
    return result ? result->path : "";
  });
}

std::optional<LoadedCheckpoint> Engine::load_checkpoint(const std::string& directory, const std::string& tag,
                                                        const LoadOptions& options) {
  return impl_->told("load_checkpoint", [&] { return impl_->load_checkpoint(directory, tag, options); });
}

std::vector<NamedTensor> Engine::module_state_dict(std::optional<int> only_rank) {
  return impl_->told("module_state_dict", [&] { return impl_->module_state_dict(only_rank); });
}
void Engine::export_safetensors(const std::string& path, const std::vector<NamedTensor>& more, bool exclude_frozen) {
  impl_->told("export_safetensors", [&] { impl_->export_safetensors(path, more, exclude_frozen); });
}
std::vector<NamedTensor> Engine::whole_model(bool exclude_frozen) {
  return impl_->told("whole_model", [&] { return impl_->whole_model(exclude_frozen); });
}
at::Tensor Engine::full_state(const std::string& parameter, const std::string& role) {
  return impl_->told("full_state", [&] { return impl_->full_state(parameter, role); });
}

void Engine::set_full_state(const std::string& parameter, const std::string& role, const at::Tensor& value) {
  impl_->told("set_full_state", [&] { impl_->set_full_state(parameter, role, value); });
}

void Engine::broadcast(const at::Tensor& values, int source) {
  impl_->told("broadcast", [&] { impl_->broadcast(values, source); });
}

double Engine::mean(double value) {
  return impl_->told("mean", [&] { return impl_->mean(value); });
}

std::optional<LocalState> Engine::local_state(const std::string& parameter, const std::string& role) {
  return impl_->told("local_state", [&] { return impl_->local_state(parameter, role); });
}

void Engine::set_local_state(const std::string& parameter, const std::string& role, const at::Tensor& values) {
  impl_->told("set_local_state", [&] { impl_->set_local_state(parameter, role, values); });
}

void Engine::offload_states(const OffloadStates& what) {
  impl_->told("offload_states", [&] { impl_->offload_states(what); });
}
void Engine::reload_states() {
  impl_->told("reload_states", [&] { impl_->reload_states(); });
}

void Engine::empty_partition_cache() {
  impl_->told("empty_partition_cache", [&] {
    impl_->boundary->enter(comm::Call::release);
    impl_->residency->release_all();
  });
}

void Engine::report_error(const std::string& event, const std::string& text) {
  impl_->channels.board()->report_error(event, text);
}
void Engine::withdraw_error() { impl_->channels.board()->withdraw_error(); }

void Engine::let_others_end(double seconds) {
  const auto board = impl_->channels.board();
  board->report_end("has ended training at step " + std::to_string(global_steps()));
  board->wait_for_ends(std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
}

void Engine::expect_model_changes() { impl_->live.expect_changes(); }

std::vector<MemoryLine> Engine::memory() const { return impl_->memory(); }
int64_t Engine::live_gathered_bytes() const { return impl_->residency->live_bytes(); }
int64_t Engine::peak_gathered_bytes() const { return impl_->residency->peak_bytes(); }
std::string Engine::summary() const { return impl_->summary(); }

}  // namespace deeptide
