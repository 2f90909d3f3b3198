// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Where the sums of an accelerator's gradients lie.
#pragma once

#include <cstdint>
#include <vector>

#include "deeptide/config.h"
#include "optim/rule.h"
#include "zero/optimizer_states.h"
#include "zero/policy.h"

namespace deeptide::engine {

/// By trained unit: of this rank's elements of its sum, how many stay on the device; empty: all. What the host steps
/// leaves, and says so in `types`, or what the configuration places on the host. Errors: ConfigError where these
/// differ, or where sums cannot leave.
std::vector<int64_t> sums_on_device(const Config& config, const optim::Rule& rule, at::Device device,
                                    const std::vector<zero::UnitForecast>& units, const zero::StagePolicy& policy,
                                    int num_ranks, zero::StateTypes& types);

}  // namespace deeptide::engine
