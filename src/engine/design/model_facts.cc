// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads tensors' sizes and types, never their values.
#include "engine/design/model_facts.h"

#include "engine/design/logical_parameters.h"
#include "engine/design/optimizer_groups.h"

namespace deeptide::engine {

ModelFacts read_model(const ModelDescription& model, std::vector<ParameterGroup> groups) {
  ModelFacts facts{.parameters = {}, .modules = model.modules, .groups = std::move(groups)};
  auto parameters = distinct_parameters(model.parameters);
  facts.device = common_device(parameters);
  assign_groups(parameters, named_groups(facts.groups));
  const KeepsFullPrecision keeps(model.modules);
  for (const sharding::Parameter& p : parameters) {
    const auto dtype = p.tensors.front().scalar_type();
    facts.parameters.push_back({p.name, p.numel, dtype, p.required_grad, p.group, keeps.tensor(p.name)});
  }
  return facts;
}

}  // namespace deeptide::engine
