// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The files of one of DeepSpeed's checkpoints, by the ranks that wrote them.
#pragma once

#include <string>
#include <vector>

namespace deeptide::checkpoint {

/// Names are relative to the folder; those of the ranks in the order of data-parallel ranks.
struct DeepspeedFolder {
  std::string path;
  std::vector<std::string> models;      // one at stages 0 to 2, one of each rank at stage 3
  std::vector<std::string> optimizers;  // none at stage 0, and of a save without states
  bool universal = false;               // a file for each state of each parameter, in zero/<parameter>/

  std::string file(const std::string& name) const { return path + "/" + name; }
};

/// Errors: CheckpointError when ranks' files are missing, and for what is not read: tensor and pipeline parallel
/// parts, experts.
DeepspeedFolder list_deepspeed_folder(const std::string& path);

}  // namespace deeptide::checkpoint
