// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares imported masters with the weights of the module that the same checkpoint holds.
#pragma once

#include "checkpoint/imports/deepspeed_model.h"
#include "checkpoint/load/reader.h"

namespace deeptide::checkpoint {

/// Compares some elements of each master with the module's weights: they are equal after rounding, unless masters were
/// read in another order than they were saved in. Checks nothing where the module has no weights (stage 3), or has
/// others than its masters by the configuration (quantized by training).
/// Errors: CheckpointError naming the first parameter that differs, and the cure.
void check_masters(const DeepspeedModel& model, const Reader& checkpoint);

}  // namespace deeptide::checkpoint
