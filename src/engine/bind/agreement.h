// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks agree before they share: what must be equal on all of them, compared.
#pragma once

#include <string>
#include <vector>

#include "comm/group.h"
#include "deeptide/config.h"
#include "deeptide/engine.h"

namespace deeptide::engine {

/// The terms that must be equal on all ranks, a line each: library, configuration, every parameter, every group.
std::vector<std::string> terms_of(const ModelDescription& model, const std::vector<ParameterGroup>& groups,
                                  const Config& config);

/// Collective. Errors: ConfigError on every rank, giving the first line that differs, as two ranks have it, and `cure`.
void check_agreement(comm::Group& control, const std::vector<std::string>& own, const comm::Site& site,
                     const std::string& cure);

/// Returns an equal number on ranks that have equal lines; 0 for none.
uint64_t digest_of(const std::vector<std::string>& terms);

/// Returns an equal number on ranks that have equal hyper-parameters, bit for bit, in any build.
uint64_t digest_of(const std::vector<Hyperparameters>& groups);

}  // namespace deeptide::engine
