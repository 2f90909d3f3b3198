// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lends parameters whole memory, and spreads what one rank wrote there.
#include "deeptide/gathered_parameters.h"

#include <ATen/core/grad_mode.h>

#include <exception>

#include "base/log.h"
#include "deeptide/zero.h"

namespace deeptide {

using at::Tensor;

GatheredParameters::GatheredParameters(Engine& engine, std::vector<Tensor> parameters, std::optional<int> source)
    : engine_(engine), parameters_(std::move(parameters)), source_(source), exceptions_(std::uncaught_exceptions()) {
  const int size = engine_.world().size;
  TORCH_CHECK_VALUE(!source_ || (*source_ >= 0 && *source_ < size), "GatheredParameters: got rank ",
                    source_.value_or(0), " as the source, expected one of 0 to ", size - 1);
  const at::NoGradGuard no_grad;
  for (const Tensor& parameter : parameters_) {
    own_.emplace_back();
    // Ranks of a host may share its memory, in which the writes of others than the source would meet.
    if (!source_ && !zero::is_sharded(parameter)) continue;
    const Tensor whole = parameter.detach().clone();
    own_.back() = parameter.variable_data();
    zero::lend_memory(parameter, whole);
  }
}

GatheredParameters::~GatheredParameters() {
  try {
    if (std::uncaught_exceptions() > exceptions_) {
      take_back();
    } else {
      end();
    }
  } catch (const std::exception& error) {
    log(LogLevel::error, std::string("GatheredParameters: ") + error.what());
  }
}

std::vector<Tensor> GatheredParameters::take_back() {
  const at::NoGradGuard no_grad;
  std::vector<Tensor> written;
  for (size_t i = 0; i < own_.size(); ++i) {
    written.push_back(parameters_[i].variable_data());
    if (own_[i].defined()) parameters_[i].set_data(own_[i]);
  }
  own_.clear();
  return written;
}

void GatheredParameters::end() {
  // First all of them: the engine, which is to carry the values, takes only parameters in memory of their own.
  const std::vector<Tensor> written = take_back();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; source_ && i < written.size(); ++i) {
    if (engine_.world().size > 1) engine_.broadcast(written[i], *source_);
    parameters_[i].copy_(written[i]);
  }
}

NoSync::NoSync(Engine& engine) : engine_(engine) {
  const int stage = engine_.config().zero().stage;
  TORCH_CHECK_VALUE(stage < 2, "NoSync needs ZeRO stage 0 or 1: stage ", stage,
                    " shards the gradients and must reduce each of them");
  engine_.set_gradient_accumulation_boundary(false);
}

NoSync::~NoSync() { engine_.set_gradient_accumulation_boundary(std::nullopt); }

}  // namespace deeptide
