// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells ranks whose hosts have folders of their own what the others have saved.
#pragma once

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/manifest.h"
#include "engine/bind/channels.h"
#include "engine/step/boundary.h"

namespace deeptide::engine {

/// Collective over the mesh: rank 0's manifest, which all hosts' folders have. A rank's own counters and client state
/// may be others.
checkpoint::Manifest manifest_of_first(Channels& channels, checkpoint::Manifest own);

/// Collective over the mesh, once all ranks have written. Gives each growing folder the tables of the ranks that write
/// elsewhere. Returns whether this rank commits: the lowest of those whose tables lay in its folder.
/// Errors: CheckpointError, on every rank.
bool share_tables(Channels& channels, Boundary& boundary, const checkpoint::SaveTarget& target);

}  // namespace deeptide::engine
