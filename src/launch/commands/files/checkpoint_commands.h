// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Commands of `deeptide checkpoint` with a file of their own.
#pragma once

#include "launch/commands/commands.h"

namespace deeptide::launch {

/// `deeptide checkpoint export`.
int run_checkpoint_export(const Arguments& arguments);

}  // namespace deeptide::launch
