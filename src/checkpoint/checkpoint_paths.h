// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Where a checkpoint's folders and files are, and which tags may name them.
#pragma once

#include <string>

namespace deeptide::checkpoint {

/// `<directory>/<tag>`. Errors: CheckpointError when `directory` is empty or `tag` is no plain folder name.
std::string folder_path(const std::string& directory, const std::string& tag);
/// `<directory>/<tag>.tmp`, where a save grows. Errors: as folder_path(), and when `<directory>/<tag>` holds something
/// that is not a checkpoint, which a save would delete.
std::string growing_path(const std::string& directory, const std::string& tag);
/// `<directory>/latest`.
std::string latest_path(const std::string& directory);

}  // namespace deeptide::checkpoint
