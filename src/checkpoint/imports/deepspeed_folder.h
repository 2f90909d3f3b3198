// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The files of one of DeepSpeed's checkpoints, by the ranks that wrote them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace deeptide::checkpoint {

/// The files of the data-parallel ranks that had one stage of a pipeline and one slice of its tensors, in the order of
/// ranks.
struct DeepspeedPart {
  std::vector<std::string> models;      // one at stages 0 to 2, one of each rank at stage 3
  std::vector<std::string> optimizers;  // none at stage 0, and of a save without states
};

/// Names are relative to the folder.
struct DeepspeedFolder {
  std::string path;
  std::vector<DeepspeedPart> parts;                    // by mp_rank: stage by stage, in each slice by slice
  std::map<int64_t, std::vector<std::string>> layers;  // of a pipeline, each layer's files by slice
  bool universal = false;                              // a file for each state of each parameter, zero/<parameter>/

  std::string file(const std::string& name) const { return path + "/" + name; }
};

/// Errors: CheckpointError when ranks' files are missing, and for what is not read: experts.
DeepspeedFolder list_deepspeed_folder(const std::string& path);

}  // namespace deeptide::checkpoint
