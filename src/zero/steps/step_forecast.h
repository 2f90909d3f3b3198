// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Forecasts the memory of the exchanges within a step from the layout of units alone.
#pragma once

#include <cstdint>
#include <vector>

#include "optim/rules/rule.h"
#include "zero/states/optimizer_states.h"
#include "zero/states/policy.h"

namespace deeptide::zero {

/// The most memory of what ranks exchange while they step: at stage 0 whole gradients, of matrices their directions,
/// of signs their means; not the messages of SignExchange. Exact if every parameter is stepped. Units: bytes.
int64_t forecast_step(const std::vector<UnitForecast>& units, const optim::Rule& rule,
                      const std::vector<Hyperparameters>& groups, const StagePolicy& policy, int num_ranks);

}  // namespace deeptide::zero
