// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies a model: torch's clone() copies each parameter by an operator, which makes a sharded one whole.
#include "deeptide/snapshot.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <string>

namespace deeptide {

std::shared_ptr<torch::nn::Module> snapshot(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = model.clone();
  } catch (const c10::Error& error) {
    // torch's text names the class and the cure; errors of a gather pass as they are.
    const std::string text = error.what_without_backtrace();
    TORCH_CHECK_VALUE(text.find("clone()") == std::string::npos, "snapshot: ", text);
    throw;
  }
  for (const at::Tensor& parameter : copy->parameters()) parameter.set_requires_grad(false);
  copy->eval();
  return copy;
}

}  // namespace deeptide
