// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves: functions of snapshots and folders that communicate with no rank.
#pragma once

#include <string>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/save/block_writer.h"
#include "checkpoint/save/snapshot.h"

namespace deeptide::checkpoint {

// A save: all ranks agree on one SaveTarget, each calls write_rank(), and after a barrier rank 0 calls commit(). A
// failure at any moment leaves the previous checkpoint as it was. Another save of the same tag never mixes its files
// with these.

/// Writes the shard and the table of one rank into the growing folder, through `buffer_bytes` of memory. Rank 0 removes
/// what crashed saves of the tag left. Returns the shard's bytes. Errors: CheckpointError (no space, not writable, a
/// tag that is no folder name), naming path, bytes and errno's text.
int64_t write_rank(const SaveTarget& target, const Snapshot& snapshot, int64_t buffer_bytes = kBufferBytes);
/// Merges the ranks' tables into the manifest, keeps the user's files of the tag's folder, moves the growing folder to
/// `<directory>/<tag>` and, with `save_latest`, points `<directory>/latest` at it. Returns `<directory>/<tag>`.
/// Errors: CheckpointError, also for ranks that contradict each other and for tables that are missing or of another
/// save.
std::string commit(const SaveTarget& target, const Manifest& manifest, bool save_latest);
/// Removes the growing folder after a failed save. Never throws for what it cannot remove.
void abandon(const SaveTarget& target);

}  // namespace deeptide::checkpoint
