// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells what a path leads to that was given as a folder of checkpoints and is none.
#pragma once

#include <string>

namespace deeptide::checkpoint {

/// Whether DeepSpeed saved what is in the folder.
bool is_deepspeed_folder(const std::string& path);
/// Whether save_pretrained wrote into the folder, or `path` is a file.
bool has_weights(const std::string& path);

/// The end of an error's sentence: ": it is …; do …". Empty when the path has nothing that is known.
std::string other_contents(const std::string& path);
/// "; it has the checkpoints 'a', 'b': give one of these tags". Empty when there are none.
std::string tags_in(const std::string& directory);

}  // namespace deeptide::checkpoint
