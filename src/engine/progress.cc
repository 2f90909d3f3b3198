// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Converts progress to JSON, and generator states to hexadecimal text.
#include "engine/progress.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <nlohmann/json.hpp>

namespace deeptide::engine {

using at::Tensor;
using nlohmann::json;

namespace {

std::string to_hex(const Tensor& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  const auto* data = bytes.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    text += kDigits[data[i] >> 4];
    text += kDigits[data[i] & 15];
  }
  return text;
}

Tensor from_hex(const std::string& text) {
  Tensor bytes = at::empty({static_cast<int64_t>(text.size() / 2)}, at::kByte);
  auto* data = bytes.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    data[i / 2] = static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

json hyper_to_json(const Hyperparameters& h) {
  return {{"lr", h.lr},
          {"beta1", h.beta1},
          {"beta2", h.beta2},
          {"eps", h.eps},
          {"weight_decay", h.weight_decay},
          {"decoupled_decay", h.decoupled_decay},
          {"bias_correction", h.bias_correction},
          {"momentum", h.momentum},
          {"dampening", h.dampening},
          {"nesterov", h.nesterov}};
}

Hyperparameters hyper_from_json(const json& j) {
  Hyperparameters h;
  h.lr = j.at("lr");
  h.beta1 = j.at("beta1");
  h.beta2 = j.at("beta2");
  h.eps = j.at("eps");
  h.weight_decay = j.at("weight_decay");
  h.decoupled_decay = j.at("decoupled_decay");
  h.bias_correction = j.at("bias_correction");
  h.momentum = j.at("momentum");
  h.dampening = j.at("dampening");
  h.nesterov = j.at("nesterov");
  return h;
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
  for (const Hyperparameters& group : progress.hyperparameters) state["groups"].push_back(hyper_to_json(group));
  return state;
}

Progress progress_from_json(const json& state) {
  Progress progress;
  for (const Counter& counter : kCounters) progress.*counter.value = state.at(counter.name);
  for (const json& group : state.at("groups")) progress.hyperparameters.push_back(hyper_from_json(group));
  return progress;
}

std::vector<std::string> mismatches(const Progress& saved, const Progress& own) {
  const size_t there = saved.hyperparameters.size(), here = own.hyperparameters.size();
  if (there == here) return {};
  return {"optimizer: the checkpoint holds hyper-parameters of " + std::to_string(there) +
          " parameter groups, this engine has " + std::to_string(here) +
          "; make the groups match, or load without optimizer states"};
}

Generators Generators::of(at::Device device) {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  Generators states{cpu.get_state(), {}};
  if (device.is_cpu()) return states;
  at::Generator own = at::globalContext().defaultGenerator(device);
  states.device = own.get_state().cpu();
  return states;
}

Generators Generators::from_json(const std::string& text) {
  if (text.empty()) return {};
  const json states = json::parse(text);
  return {from_hex(states.at("cpu")), states.contains("device") ? from_hex(states["device"]) : Tensor()};
}

std::string Generators::to_json() const {
  json states = {{"cpu", to_hex(cpu)}};
  if (device.defined()) states["device"] = to_hex(device);
  return states.dump();
}

void Generators::restore(at::Device where) const {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  if (cpu.defined()) generator.set_state(cpu);
  if (where.is_cpu() || !device.defined()) return;
  at::Generator own = at::globalContext().defaultGenerator(where);
  own.set_state(device);
}

}  // namespace deeptide::engine
