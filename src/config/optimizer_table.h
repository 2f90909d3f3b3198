// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The "optimizer" section as values: which optimizer, and its hyper-parameters by name.
#pragma once

#include "config/check/values.h"
#include "deeptide/config.h"

namespace deeptide::config {

/// Without a type when the section is absent.
OptimizerConfig optimizer_config(const Values& values);

}  // namespace deeptide::config
