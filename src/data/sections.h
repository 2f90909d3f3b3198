// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rules of the sections that leave out work: curricula, batches by length, dropped tokens.
#pragma once

#include "deeptide/config.h"

namespace deeptide::data {

/// Checks what the sections that are on need, alone and together. Errors: ConfigError naming the key and the cure.
void check_sections(const Config& config);

}  // namespace deeptide::data
