// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The folders, such as one per drive, that hold parts of shards; a checkpoint has links to them.
#pragma once

#include <string>

#include "checkpoint/format/checkpoint_paths.h"

namespace deeptide::checkpoint {

// A part is at `<folder>/<directory's name>-<hash of its path>/<tag>.<nonce>/<shard's name>`, so that several runs may
// use the same folders. The last folder but one ends in ".tmp" until the save is committed.

/// The place in `folder` of all that checkpoints of `directory` keep there. Errors: CheckpointError for an empty name.
std::string home_of_parts(const std::string& directory, const std::string& folder);
/// The folder in which a save's parts grow, and the one that has them once it is committed.
std::string growing_parts(const SaveTarget& target, const std::string& folder);
std::string settled_parts(const SaveTarget& target, const std::string& folder);

/// Puts the link into the save's growing folder that leads to where a part will be. Errors: CheckpointError.
void link_part(const SaveTarget& target, const std::string& folder, const std::string& name);
/// Moves the parts of all ranks to where the links lead. Errors: CheckpointError, also for a link that leads nowhere.
void settle_parts(const SaveTarget& target);
/// Removes the parts of a save that was not committed. Never throws for what it cannot remove.
void remove_parts(const SaveTarget& target) noexcept;
/// Removes a checkpoint's folder and the parts that its links lead to. What cannot be removed stays.
void remove_with_parts(const std::string& folder) noexcept;

}  // namespace deeptide::checkpoint
