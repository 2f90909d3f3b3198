// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads from folders that hosts do not share: each has its ranks' files and the whole table of contents, and sends the
// others what their loads lack.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/load/reader.h"
#include "engine/bind/channels.h"
#include "engine/step/boundary.h"

namespace deeptide::engine {

/// Collective over the mesh. `own`: the latest tag in this rank's folder; empty: none. Returns the one of them that
/// every host with a checkpoint has: a run that died between two hosts' commits goes on from the save before. Errors:
/// CheckpointError, listing each rank's tag, where there is none.
std::string agree_on_tag(Channels& channels, const std::string& directory, const std::string& own);

/// This rank's folder of a checkpoint, and the ranks that have the same files of it.
struct HostFolder {
  std::string folder;
  std::string manifest;  // a rank has it; its text; empty: none
  std::string error;     // ranks that have it have different ones
  int index = 0, ranks = 1;

  /// Errors: CheckpointError.
  checkpoint::Reader open() const;
};

/// Collective over the mesh. Finds the manifest, on whichever host it is.
HostFolder look_at_hosts(Channels& channels, const std::string& directory, const std::string& tag);

/// Collective over the mesh. Fills `wanted` from this folder, and the rest from other hosts, block by block.
/// `readers`: as Reader::read. Errors: CheckpointError, on every rank.
void read_from_hosts(Channels& channels, Boundary& boundary, const checkpoint::Reader& reader,
                     const std::vector<checkpoint::Piece>& wanted, int readers);

}  // namespace deeptide::engine
