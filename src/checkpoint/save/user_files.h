// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The user's files in a tag's folder, which a new save of the tag keeps.
#pragma once

#include <string>

namespace deeptide::checkpoint {

/// Gives folder `to` what the user has in folder `from`: links files, or copies them where the filesystem has no links,
/// and rebuilds folders. Leaves out the checkpoint's own files, and whatever `to` has already. `from` stays as it is.
void keep_user_files(const std::string& from, const std::string& to);

}  // namespace deeptide::checkpoint
