// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Iterates with products of a block's Hessian and a vector, which autograd takes from gradients that have a graph.
#include "compression/curvature.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <utility>

#include "base/libraries/format.h"
#include "base/log.h"
#include "deeptide/errors.h"

namespace deeptide {

using at::Tensor;
using Tensors = std::vector<Tensor>;

namespace {

Tensor inner(const Tensors& one, const Tensors& other) {
  Tensors sums;
  for (size_t i = 0; i < one.size(); ++i) sums.push_back((one[i] * other[i]).sum());
  return at::stack(sums).sum();
}

Tensor finite(const Tensor& x) { return at::nan_to_num(x, 0.0, 0.0, 0.0); }

Tensors normalised(const Tensors& vector, double stability) {
  const Tensor norm = inner(vector, vector).sqrt() + stability;
  Tensors result;
  for (const Tensor& part : vector) result.push_back(finite(part / norm));
  return result;
}

/// The numbers that torch's generator would draw next; training draws them still.
Tensors random_like(const Tensors& parameters) {
  at::Generator torchs = at::detail::getDefaultCPUGenerator();
  at::Generator copy;
  {
    const std::lock_guard lock(torchs.mutex());
    copy = torchs.clone();
  }
  Tensors vector;
  for (const Tensor& parameter : parameters) {
    vector.push_back(at::randn(parameter.sizes(), copy, at::kFloat).to(parameter.device()));
  }
  return vector;
}

/// The Hessian times the vector, in fp32.
Tensors product(const Tensors& parameters, const Tensors& gradients, const Tensors& vector) {
  Tensors typed;
  for (size_t i = 0; i < vector.size(); ++i) typed.push_back(vector[i].to(gradients[i].scalar_type()));
  const auto found = torch::autograd::grad(gradients, parameters, typed, /*retain_graph=*/true, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  Tensors result;
  for (size_t i = 0; i < vector.size(); ++i) {
    result.push_back(found[i].defined() ? finite(found[i]).to(at::kFloat) : at::zeros_like(vector[i]));
  }
  return result;
}

}  // namespace

Eigenvalue largest_eigenvalue(const Tensors& parameters, const Tensors& gradients, const PowerIteration& how) {
  Tensors vector = normalised(random_like(parameters), how.stability);
  double value = 1.0, before = 0.0;
  int64_t steps = 0;
  while (steps < how.max_iter && value != 0 && std::abs((value - before) / value) >= how.tol) {
    before = value;
    const Tensors products = product(parameters, gradients, vector);
    value = inner(products, vector).item<double>();
    vector = normalised(products, how.stability);
    for (Tensor& part : vector) part = part / how.scale;
    ++steps;
  }
  return {value * how.scale, steps};
}

namespace compression {
namespace {

/// The first `count` modules of the list at `name`.
std::vector<std::shared_ptr<torch::nn::Module>> blocks_at(const torch::nn::Module& model, const std::string& name,
                                                          int64_t count) {
  if (name.empty() || count < 1) {
    throw ConfigError(format_text(
        "eigenvalue: got layer_name '{}' and layer_num {}; give the name of the list of layers and how many "
        "it has",
        name, count));
  }
  const auto modules = model.named_modules();
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  for (int64_t number = 0; number < count; ++number) {
    const auto* block = modules.find(name + "." + std::to_string(number));
    if (block == nullptr) {
      throw ConfigError(format_text("eigenvalue.layer_name: the model has no list of {} layers at '{}'", count, name));
    }
    blocks.push_back(*block);
  }
  return blocks;
}

}  // namespace

Curvature::Curvature(const Json& section, const torch::nn::Module& model)
    : iteration_{.max_iter = section.at("max_iter").get<int64_t>(),
                 .tol = section.at("tol").get<double>(),
                 .stability = section.at("stability").get<double>()},
      every_(section.at("gas_boundary_resolution").get<int64_t>()),
      is_verbose_(section.at("verbose").get<bool>()),
      blocks_(blocks_at(model, section.at("layer_name").get<std::string>(), section.at("layer_num").get<int64_t>())) {
  for (size_t number = 0; number < blocks_.size(); ++number) {
    for (const auto& module : blocks_[number]->modules()) block_of_[module.get()] = number;
  }
}

std::vector<double> Curvature::eigenvalues(const Tensor& loss) const {
  std::vector<double> values;
  for (const auto& block : blocks_) {
    Tensors trained;
    for (const Tensor& parameter : block->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    const auto gradients = torch::autograd::grad({loss}, trained, {}, /*retain_graph=*/true, /*create_graph=*/true,
                                                 /*allow_unused=*/true);
    Tensors parameters, curved;
    for (size_t i = 0; i < trained.size(); ++i) {
      if (!gradients[i].defined() || !gradients[i].grad_fn()) continue;
      parameters.push_back(trained[i]);
      curved.push_back(gradients[i]);
    }
    const Eigenvalue found = parameters.empty() ? Eigenvalue{} : largest_eigenvalue(parameters, curved, iteration_);
    if (is_verbose_) {
      log(LogLevel::info,
          format_text("block {}: eigenvalue {:.6g} after {} iterations", values.size(), found.value, found.iterations));
    }
    values.push_back(found.value);
  }
  return values;
}

void Curvature::measure(int64_t step, const Tensor& loss, const std::function<double(double)>& mean) {
  if (step % every_ != 0) return;
  std::vector<double> values;
  try {
    values = eigenvalues(loss);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find("derivative") == text.npos) throw;
    throw ConfigError(
        format_text("quantize_training.eigenvalue: an operator of the model has no second derivative ({}); use "
                    "attention made of plain operators",
                    text));
  }
  double largest = 0.0;
  for (double& value : values) largest = std::max(largest, std::abs(value = mean(value)));
  factors_.clear();
  for (const double value : values) {
    factors_.push_back(1 + static_cast<int64_t>(4 * (value != 0 ? std::abs(value) / largest : 1.0)));
  }
}

int64_t Curvature::factor(const torch::nn::Module& layer) const {
  const auto block = block_of_.find(&layer);
  return factors_.empty() || block == block_of_.end() ? 1 : factors_[block->second];
}

}  // namespace compression
}  // namespace deeptide
