// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads DeepSpeed's state beside tensors: steps, learning rates, loss scale, schedule, and the program's own state.
#pragma once

#include <map>
#include <string>

#include "checkpoint/format/manifest.h"
#include "checkpoint/imports/archives/torch_file.h"
#include "checkpoint/imports/deepspeed_folder.h"
#include "deeptide/hyperparameters.h"

namespace deeptide::checkpoint {

/// The optimizer that the configuration in a model file names; null: none, or one that is not in our table.
const OptimizerInfo* optimizer_of(const TorchFile& model);

/// The manifest of our format. `steps`: of each parameter. What JSON cannot hold of the client state is left out, with
/// a warning.
Manifest deepspeed_manifest(const DeepspeedFolder& folder, const TorchFile& model,
                            const std::map<std::string, int64_t>& steps, const OptimizerInfo* optimizer);

}  // namespace deeptide::checkpoint
