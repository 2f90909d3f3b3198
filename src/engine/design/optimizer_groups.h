// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which parameters train with which hyper-parameters, and whether these suit the optimizer.
#pragma once

#include <vector>

#include "deeptide/engine.h"
#include "optim/rules/rule.h"
#include "sharding/unit.h"

namespace deeptide::engine {

/// The groups that were given, or the configuration's: one, without names, of all trainable parameters; for Muon its
/// matrices and the rest, by name.
std::vector<ParameterGroup> optimizer_groups(const ModelDescription& model, const Config& config,
                                             const InitOptions& options);
/// The groups as a model is bound to them: none if a single one without names has all trainable parameters.
std::vector<ParameterGroup> named_groups(const std::vector<ParameterGroup>& groups);

/// Errors: ValueError when `hyper` is not of `optimizer`, or naming a number that is not finite or out of its range.
void check_hyperparameters(const Hyperparameters& hyper, const OptimizerInfo* optimizer);

/// Errors: ValueError naming a parameter of less than two dimensions that the rule would take as a matrix.
void check_matrices(const std::vector<sharding::Unit*>& units, const optim::Rule& rule,
                    const std::vector<Hyperparameters>& groups);

}  // namespace deeptide::engine
