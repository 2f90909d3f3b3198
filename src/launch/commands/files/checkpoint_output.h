// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints what the commands on checkpoints found, for people and as JSON.
#pragma once

#include <string>
#include <vector>

#include "deeptide/checkpoint.h"

namespace deeptide::launch {

/// A bar on standard error where that is a terminal; nothing elsewhere. Ends its line when it goes.
CheckpointProgress progress_bar(const std::string& what);

void print_list(const std::vector<CheckpointSummary>& checkpoints, bool json);
void print_checkpoint(const CheckpointReader& reader, bool json);
/// Range, mean, norm and first elements of each tensor of this name.
void print_tensors(const CheckpointReader& reader, const std::string& name);
void print_differences(const std::vector<CheckpointDifference>& differences, bool json);

}  // namespace deeptide::launch
