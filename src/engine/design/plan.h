// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Forecasts a design's memory and files.
#pragma once

#include <cstdint>

#include "deeptide/plan.h"
#include "engine/design/design.h"

namespace deeptide::engine {

/// `config`: of the design.
MemoryPlan plan_of(const Design& design, const Config& config);

/// Memory that a transport of two levels keeps for itself. Units: bytes.
int64_t transport_bytes(const Design& design);
/// Memory of what ranks exchange within a step. Units: bytes.
int64_t step_bytes(const Design& design);

}  // namespace deeptide::engine
