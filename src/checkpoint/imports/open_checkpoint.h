// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Opens checkpoints of this library and of others alike.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "checkpoint/load/reader.h"

namespace deeptide::checkpoint {

/// The tag of weights that lie in a directory itself; no checkpoint has it, since folder_path() refuses it.
inline constexpr const char* kWeightsTag = ".";

/// Reads `<directory>/<tag>`: our format, what DeepSpeed saved at any stage, universal ones too, or weights alone.
/// Nothing is converted: elements are read from the files that have them.
/// Errors: CheckpointError, as Reader, and naming what of DeepSpeed's cannot be read.
/// `names`: the model's, which weights alone are renamed for where they are of its base model (fit_names).
Reader open_checkpoint(const std::string& directory, const std::string& tag, const std::set<std::string>& names = {});

/// The contents of DeepSpeed's checkpoint in `folder`; none for any other folder. Errors: as above.
std::optional<ManifestTable> foreign_contents(const std::string& folder);

/// The tag under which open_checkpoint() reads weights that are in `directory` itself: files of safetensors or
/// torch.save, as Transformers names them, or if `directory` is such a file. Empty when there are none, or a checkpoint
/// that `latest` names.
std::string tag_of_weights(const std::string& directory);

/// The tag in `<directory>/latest`; with `universal`, the one in `<directory>/latest_universal` if that is there.
/// Empty when there is none.
std::string tag_to_load(const std::string& directory, bool universal);

}  // namespace deeptide::checkpoint
