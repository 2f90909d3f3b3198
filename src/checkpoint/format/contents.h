// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A checkpoint's folder with its manifest, checked against the shards: what all readers share.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"

namespace deeptide::checkpoint {

/// The tag in `<directory>/latest`; empty when there is none.
std::string latest_tag(const std::string& directory);

/// `<directory>/<tag>`, or where a crash left it while another save replaced it. Whether it is there is not checked.
std::string existing_folder(const std::string& directory, const std::string& tag);

struct Contents {
  std::string folder;
  ManifestTable table;
  bool of_one_host = false;  // files may lie on other hosts
};

/// Reads the manifest alone. Errors: CheckpointError when it is missing or malformed.
Contents read_manifest(const std::string& folder);

/// One line for each fault of a shard that the manifest names: missing, truncated, malformed, of another save, another
/// header than was written, or pieces elsewhere than expected. Names the first tensors that a fault concerns.
std::vector<std::string> shard_faults(const Contents& contents);

/// A folder that has a part of the files: checks the headers of those. Errors: CheckpointError, the first fault.
Contents contents_of_host(const std::string& folder, ManifestTable table);

/// Reads the manifest and checks all shards' headers. Errors: CheckpointError, the first fault.
Contents open_contents(const std::string& folder);

}  // namespace deeptide::checkpoint
