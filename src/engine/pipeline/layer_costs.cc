// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs layers one by one, each on what the one before returned, and counts.
#include "engine/pipeline/layer_costs.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/libraries/format.h"
#include "deeptide/errors.h"
#include "deeptide/pipeline_partition.h"
#include "deeptide/zero.h"

namespace deeptide::engine {
namespace {

using at::Tensor;

constexpr int kRuns = 3;
constexpr double kBytesTrained = 4 + 4 + 4 + 4;  // of an element: its sum of gradients, master and two moments

/// Puts the CPU's random generator back where it was.
class Undrawn {
 public:
  Undrawn() : generator_(at::globalContext().defaultGenerator(at::kCPU)), state_(generator_.get_state()) {}
  ~Undrawn() { generator_.set_state(state_); }
  Undrawn(const Undrawn&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

/// Puts a module's buffers back as they were.
class Unchanged {
 public:
  explicit Unchanged(const std::shared_ptr<torch::nn::Module>& module) {
    if (!module) return;
    for (const Tensor& buffer : module->buffers()) before_.emplace_back(buffer, buffer.detach().clone());
  }
  ~Unchanged() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value] : before_) buffer.copy_(value);
  }
  Unchanged(const Unchanged&) = delete;

 private:
  std::vector<std::pair<Tensor, Tensor>> before_;
};

/// Counts what this thread allocates and does not free while it lives.
class Meter {
 public:
  int64_t bytes() const { return counts_->bytes; }

 private:
  struct Counts : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*memory*/, int64_t size, size_t /*allocated*/, size_t /*reserved*/,
                           c10::Device /*device*/) override {
      bytes += size;
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t bytes = 0;
  };
  const at::RecordFunctionGuard no_profiler_{/*is_enabled=*/false};  // whose place this takes
  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  const c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, counts_};
};

/// The same tensors as another stage gets them: without a graph, floating ones with a gradient.
Activations as_inputs(const Activations& values) {
  Activations inputs;
  for (const Tensor& value : values) {
    inputs.push_back(value.defined() ? value.detach().set_requires_grad(value.is_floating_point()) : value);
  }
  return inputs;
}

Activations with_gradient(const Activations& tensors) {
  Activations found;
  std::ranges::copy_if(tensors, std::back_inserter(found), [](const Tensor& one) { return one.requires_grad(); });
  return found;
}

/// Calls visit(made, run, values) for each layer, where run(values) returns its outputs; visit returns the next values.
template <typename Visit>
void for_each_layer(const std::vector<PipelineLayer>& layers, const char* method, Activations values,
                    const Visit& visit) {
  const Undrawn undrawn;
  const at::AutoGradMode with_graph(true);
  std::map<std::string, PipelineLayer::Made> tied;
  for (size_t i = 0; i < layers.size(); ++i) {
    const PipelineLayer& layer = layers[i];
    const bool is_tied = !layer.key().empty();
    const PipelineLayer::Made made = is_tied && tied.contains(layer.key()) ? tied.at(layer.key()) : layer.made();
    if (is_tied) tied[layer.key()] = made;
    const PipelineLayer::Forward forward = is_tied ? layer.forward_of(made) : made.forward;
    const Unchanged unchanged(made.module);
    const auto run = [&](const Activations& inputs) {
      try {
        return forward(inputs);
      } catch (const std::exception& error) {
        throw ConfigError(format_text(
            "partition \"{}\": layer {} ({}) fails on profile_input: {}; take another method, or inputs as those of a "
            "micro-batch",
            method, i, made.module ? made.module->name() : "a function", error.what()));
      }
    };
    values = visit(made, run, values);
  }
}

bool is_among(const std::vector<c10::Storage>& storages, const c10::Storage& storage) {
  return std::ranges::any_of(storages, [&](const c10::Storage& one) { return one.is_alias_of(storage); });
}

/// Storages of tensors, and which of them a layer's backward keeps.
class Storages {
 public:
  explicit Storages(const Activations& tensors) { add(tensors); }

  void add(const Activations& tensors) {
    for (const Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      if (!is_among(all, tensor.storage())) all.push_back(tensor.storage());
    }
  }
  std::vector<size_t> users() const {
    std::vector<size_t> counts;
    for (const c10::Storage& storage : all) counts.push_back(storage.use_count());
    return counts;
  }

  std::vector<c10::Storage> all;
};

/// Bytes that backward of a layer keeps beyond `before`, which an earlier layer's keeps; what the layer keeps of its
/// inputs and outputs is noted in `before`. Returns (bytes, detached outputs).
template <typename Run>
std::pair<double, Activations> kept_by(const Run& run, const Activations& values, std::vector<c10::Storage>& before) {
  const Tensor leaf = at::empty({0}).set_requires_grad(true);  // a graph keeps its leaves, and inputs are to be none
  Activations inputs = as_inputs(values);
  for (Tensor& input : with_gradient(inputs)) {
    input.set_requires_grad(false);
    torch::autograd::impl::set_gradient_edge(input, torch::autograd::impl::gradient_edge(leaf));
  }
  const Storages given(inputs);
  int64_t bytes = 0;
  Activations outputs;
  {
    const Meter meter;
    outputs = run(inputs);
    bytes = meter.bytes();
  }
  std::vector<torch::autograd::Edge> graph;
  for (const Tensor& output : with_gradient(outputs)) graph.push_back(torch::autograd::impl::gradient_edge(output));
  outputs = as_inputs(outputs);
  Storages seen(inputs);
  inputs.clear();  // the graph has those that it keeps
  seen.add(outputs);
  const std::vector<size_t> with_graph = seen.users();
  graph.clear();
  const std::vector<size_t> without = seen.users();
  std::vector<c10::Storage> kept;
  for (size_t i = 0; i < seen.all.size(); ++i) {
    const c10::Storage& storage = seen.all[i];
    const auto size = static_cast<int64_t>(storage.nbytes());
    const bool is_kept = with_graph[i] > without[i];
    const bool was_kept = is_among(before, storage);
    if (is_among(given.all, storage)) {
      if (is_kept && !was_kept) bytes += size;
    } else if (!is_kept) {
      bytes -= size;
    }
    if (is_kept || was_kept) kept.push_back(storage);
  }
  before = std::move(kept);
  return {static_cast<double>(bytes), outputs};
}

/// Returns on all ranks what `make` returns, or throws, on rank 0. Collective.
template <typename Make>
std::vector<double> told_by_first(const World& world, const Make& make) {
  if (world.size == 1) return make();
  const auto number = world.store->add("deeptide/pipeline/costs_asked/" + std::to_string(world.rank), 1);
  const std::string key = "deeptide/pipeline/costs/" + std::to_string(number);
  if (world.rank == 0) {
    std::vector<uint8_t> text(1);
    try {
      const std::vector<double> costs = make();
      text.resize(1 + costs.size() * sizeof(double));
      std::memcpy(text.data() + 1, costs.data(), costs.size() * sizeof(double));
    } catch (const ConfigError& error) {
      const std::string what = error.what();
      text.assign(1, 1);
      text.insert(text.end(), what.begin(), what.end());
    }
    world.store->set(key, text);
  }
  const std::vector<uint8_t> text = world.store->get(key);
  if (text.front() == 1) throw ConfigError(std::string(text.begin() + 1, text.end()));
  std::vector<double> costs((text.size() - 1) / sizeof(double));
  std::memcpy(costs.data(), text.data() + 1, costs.size() * sizeof(double));
  return costs;
}

}  // namespace

int64_t num_trained(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return std::accumulate(parameters.begin(), parameters.end(), int64_t{0},
                         [](int64_t sum, const Tensor& one) { return sum + (one.requires_grad() ? one.numel() : 0); });
}

int64_t num_trained(const PipelineLayer& layer) {
  const Undrawn undrawn;
  const zero::Init no_memory;
  const PipelineLayer::Made made = layer.made();
  return made.module ? num_trained(*made.module) : 0;
}

std::vector<double> seconds_of_layers(const std::vector<PipelineLayer>& layers, const Activations& sample) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  for_each_layer(layers, "profile", sample, [&](const auto& made, const auto& run, const Activations& values) {
    Activations trained, outputs;
    if (made.module) trained = with_gradient(made.module->parameters());
    seconds.push_back(std::numeric_limits<double>::infinity());
    for (int i = 0; i < kRuns; ++i) {
      const Activations inputs = as_inputs(values);
      const auto begin = Clock::now();
      outputs = run(inputs);
      const Activations ends = with_gradient(outputs);
      Activations wanted = with_gradient(inputs), ones;
      wanted.insert(wanted.end(), trained.begin(), trained.end());
      for (const Tensor& end : ends) ones.push_back(at::ones_like(end));
      if (!ends.empty() && !wanted.empty()) torch::autograd::grad(ends, wanted, ones, false, false, true);
      seconds.back() = std::min(seconds.back(), std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return as_inputs(outputs);
  });
  return seconds;
}

LayerBytes bytes_of_layers(const std::vector<PipelineLayer>& layers, const Activations& sample) {
  LayerBytes found;
  std::set<std::shared_ptr<torch::nn::Module>> seen;  // held, so that no other gets the address of one that was
  std::vector<c10::Storage> before;
  for_each_layer(layers, "memory", sample, [&](const auto& made, const auto& run, const Activations& values) {
    double states = 0.0;
    if (made.module && seen.insert(made.module).second) {
      for (const Tensor& parameter : made.module->parameters()) {
        const double bytes = static_cast<double>(parameter.element_size()) + kBytesTrained * parameter.requires_grad();
        states += bytes * static_cast<double>(parameter.numel());
      }
    }
    found.states.push_back(states);
    auto [kept, outputs] = kept_by(run, values, before);
    found.kept.push_back(kept);
    return std::move(outputs);
  });
  return found;
}

std::vector<int64_t> measured_bounds(const std::vector<PipelineLayer>& layers, const PipelineOptions& options,
                                     const World& world) {
  const bool by_time = options.partition == PipelinePartition::profile;
  const int parts = options.num_stages * options.chunks;
  if (options.profile_input.empty()) {
    throw ConfigError(format_text("partition \"{}\": give profile_input, the first layer's input in a micro-batch",
                                  by_time ? "profile" : "memory"));
  }
  const std::vector<double> costs = told_by_first(world, [&] {
    if (by_time) return seconds_of_layers(layers, options.profile_input);
    auto [states, kept] = bytes_of_layers(layers, options.profile_input);
    states.insert(states.end(), kept.begin(), kept.end());
    return states;
  });
  if (by_time) return bounds_by_time(costs, parts);
  const auto middle = costs.begin() + std::ssize(layers);
  return bounds_by_memory({costs.begin(), middle}, {middle, costs.end()}, options.num_stages, options.chunks);
}

}  // namespace deeptide::engine
