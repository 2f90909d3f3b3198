// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Removes checkpoints that are no longer wanted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/checkpoint_paths.h"

namespace deeptide::checkpoint {

/// Which checkpoints stay.
struct Retention {
  int64_t keep_last = 0;   // with the largest steps; 0: all
  int64_t keep_every = 0;  // also those whose step is a multiple; 0: none
};

struct SavedStep {
  int64_t step = 0;
  std::string tag;
};

/// The tags that may go. `saved`: the oldest first. Never one of `kept`.
std::vector<std::string> superfluous(const std::vector<SavedStep>& saved, const Retention& retention,
                                     const std::vector<std::string>& kept);

/// Renames the folder before its files go: whoever lists the directory sees a whole checkpoint or none, also after a
/// crash. Errors: CheckpointError when it cannot be renamed, or not be removed then.
void remove_checkpoint(const std::string& directory, const std::string& tag);

/// After a commit of `target`, on one rank. Concerns tags of the engine's own, "global_step<n>"; those that a program
/// chose always stay. Also removes what crashed saves of such tags left. What cannot be removed stays; never removes
/// the checkpoint that `target` or `latest` names.
void retain(const SaveTarget& target, const Retention& retention);

}  // namespace deeptide::checkpoint
