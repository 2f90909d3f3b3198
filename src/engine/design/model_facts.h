// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes a model to a design by names and numbers, without tensors: it can be asked again while a model is bound.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "sharding/unit.h"

namespace deeptide::engine {

struct ParameterFacts {
  std::string name;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;  // the program's
  bool requires_grad = true;
  int group = -1;                     // of the optimizer; -1: none
  bool keeps_full_precision = false;  // as KeepsFullPrecision says
};

struct ModelFacts {
  std::vector<ParameterFacts> parameters;  // distinct ones, in the model's order
  std::vector<ModuleInfo> modules;
  std::vector<ParameterGroup> groups;  // with their hyper-parameters
  at::Device device = at::kCPU;
};

/// `groups`: as optimizer_groups says. Errors: ValueError as distinct_parameters, common_device, assign_groups.
ModelFacts read_model(const ModelDescription& model, std::vector<ParameterGroup> groups);

}  // namespace deeptide::engine
