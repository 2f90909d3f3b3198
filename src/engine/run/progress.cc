// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Converts progress to JSON, and generator states to hexadecimal text.
#include "engine/run/progress.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/libraries/nlohmann.h"
#include "deeptide/interpreter.h"

namespace deeptide::engine {

using at::Tensor;
using nlohmann::json;

namespace {

/// The binding's, once it has installed them.
InterpreterGenerators& interpreter_generators() {
  static InterpreterGenerators generators;
  return generators;
}

std::string to_hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char each : bytes) {
    const auto byte = static_cast<uint8_t>(each);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string to_hex(const Tensor& bytes) {
  return to_hex({static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())});
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

Tensor tensor_from_hex(const std::string& text) {
  const std::string bytes = from_hex(text);
  Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::ranges::copy(bytes, static_cast<char*>(tensor.mutable_data_ptr()));
  return tensor;
}

json hyper_to_json(const Hyperparameters& hyper) {
  json saved = json::object();
  for (const HyperparameterInfo& info : hyper.optimizer()->hyperparameters) {
    const double value = hyper.get(info.name);
    saved[info.name] = info.flag ? json(value != 0.0) : json(value);
  }
  return saved;
}

/// Stands for the optimizer of a program whose checkpoint others saved, which does not name it: its states are
/// compared.
constexpr const char* kAny = "*";

/// The name that checkpoints had for a hyper-parameter before it was torch's.
const char* former_name(const std::string& name) {
  return name == "decoupled_weight_decay" ? "decoupled_decay" : name.c_str();
}

Hyperparameters hyper_from_json(const json& saved, Hyperparameters hyper) {
  if (!hyper.optimizer()) return hyper;
  for (const HyperparameterInfo& info : hyper.optimizer()->hyperparameters) {
    const auto found = saved.contains(info.name) ? saved.find(info.name) : saved.find(former_name(info.name));
    if (found == saved.end()) continue;
    hyper.set(info.name, info.flag ? static_cast<double>(found->get<bool>()) : found->get<double>());
  }
  return hyper;
}

/// A counter: its name in a checkpoint, and its field.
struct Counter {
  const char* name;
  int64_t Progress::*value;
};

constexpr Counter kCounters[] = {{"global_steps", &Progress::global_steps},
                                 {"skipped_steps", &Progress::skipped_steps},
                                 {"micro_steps", &Progress::micro_steps},
                                 {"optimizer_steps", &Progress::optimizer_steps},
                                 {"schedule_iteration", &Progress::schedule_iteration}};

}  // namespace

json to_json(const Progress& progress) {
  json state = json::object();
  for (const Counter& counter : kCounters) state[counter.name] = progress.*counter.value;
  state["global_samples"] = progress.global_samples;
  state["skipped_in_a_row"] = progress.skipped_in_a_row;
  if (!progress.parameter_steps.empty()) state["parameter_steps"] = progress.parameter_steps;
  if (!progress.parameter_numbers.empty()) state["parameter_numbers"] = progress.parameter_numbers;
  if (std::isfinite(progress.last_loss)) state["last_loss"] = progress.last_loss;
  if (progress.offload_ratio >= 0.0) state["offload_ratio"] = progress.offload_ratio;
  const optim::LossScale& loss = progress.loss_scale;
  state["loss_scale"] = {{"scale", loss.scale},
                         {"steps", loss.steps},
                         {"last_overflow", loss.last_overflow},
                         {"hysteresis", loss.hysteresis}};
  if (!progress.hyperparameters.empty()) state["optimizer"] = progress.hyperparameters.front().optimizer()->name;
  state["groups"] = json::array();
  for (const Hyperparameters& group : progress.hyperparameters) state["groups"].push_back(hyper_to_json(group));
  return state;
}

Progress progress_from_json(const json& state, const Progress& own) {
  Progress progress;
  progress.loss_scale = own.loss_scale;
  if (state.contains("loss_scale")) {
    const json& loss = state["loss_scale"];
    progress.loss_scale = {loss.at("scale"), loss.at("steps"), loss.at("last_overflow"), loss.at("hysteresis")};
  }
  for (const Counter& counter : kCounters) progress.*counter.value = state.at(counter.name);
  if (state.contains("parameter_steps")) state["parameter_steps"].get_to(progress.parameter_steps);
  if (state.contains("parameter_numbers")) state["parameter_numbers"].get_to(progress.parameter_numbers);
  progress.global_samples = state.value("global_samples", int64_t{0});
  progress.last_loss = state.value("last_loss", kNoLoss);
  progress.offload_ratio = state.value("offload_ratio", -1.0);
  progress.optimizer = state.value("optimizer", state.value("optimizer_unnamed", false) ? kAny : "");
  progress.skipped_in_a_row = state.value("skipped_in_a_row", int64_t{0});
  const std::vector<Hyperparameters>& groups = own.hyperparameters;
  if (state.at("groups").is_null()) progress.hyperparameters = groups;  // others saved none: the program's stay
  for (const json& group : state.at("groups")) {
    const size_t i = progress.hyperparameters.size();
    progress.hyperparameters.push_back(hyper_from_json(group, i < groups.size() ? groups[i] : Hyperparameters()));
  }
  return progress;
}

std::vector<std::string> mismatches(const Progress& saved, const Progress& own) {
  const std::string name = own.hyperparameters.empty() ? "" : own.hyperparameters.front().optimizer()->name;
  // Checkpoints did not name it before there were optimizers of the caller's: theirs are the table's.
  const bool other =
      saved.optimizer != kAny && (saved.optimizer.empty() ? !find_optimizer(name) : saved.optimizer != name);
  if (!name.empty() && !saved.hyperparameters.empty() && other) {
    return {"optimizer: the checkpoint holds the states of " +
            (saved.optimizer.empty() ? std::string("another optimizer") : saved.optimizer) + ", this engine has " +
            name + "; use the same optimizer, or load without optimizer states"};
  }
  const size_t there = saved.hyperparameters.size(), here = own.hyperparameters.size();
  if (there == here) return {};
  return {"optimizer: the checkpoint holds hyper-parameters of " + std::to_string(there) +
          " parameter groups, this engine has " + std::to_string(here) +
          "; make the groups match, or load without optimizer states"};
}

Generators Generators::of(at::Device device) {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  Generators states{cpu.get_state(), {}, {}};
  if (interpreter_generators().read) states.interpreter = interpreter_generators().read();
  if (device.is_cpu()) return states;
  at::Generator own = at::globalContext().defaultGenerator(device);
  states.device = own.get_state().cpu();
  return states;
}

Generators Generators::from_json(const std::string& text) {
  if (text.empty()) return {};
  const json states = read_json(text);
  return {tensor_from_hex(states.at("cpu")), states.contains("device") ? tensor_from_hex(states["device"]) : Tensor(),
          from_hex(states.value("interpreter", ""))};
}

std::string Generators::to_json() const {
  json states = {{"cpu", to_hex(cpu)}};
  if (device.defined()) states["device"] = to_hex(device);
  if (!interpreter.empty()) states["interpreter"] = to_hex(interpreter);
  return write_json(states);
}

void Generators::restore(at::Device where) const {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  if (cpu.defined()) generator.set_state(cpu);
  if (!interpreter.empty() && interpreter_generators().set) interpreter_generators().set(interpreter);
  if (where.is_cpu() || !device.defined()) return;
  at::Generator own = at::globalContext().defaultGenerator(where);
  own.set_state(device);
}

}  // namespace deeptide::engine

namespace deeptide {

void set_interpreter_generators(InterpreterGenerators generators) {
  engine::interpreter_generators() = std::move(generators);
}

}  // namespace deeptide
