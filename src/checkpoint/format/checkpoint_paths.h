// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names a checkpoint's folders and files, and the tags that may name them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::checkpoint {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kGrowingLatest = "latest.tmp";  // in a tag's folder, until it is `<directory>/latest`
/// "rank_00000.safetensors"; of a shard that is cut, the parts after the first: "rank_00000-1.safetensors".
std::string shard_name(int rank, int part = 0);
std::string rank_table_name(int rank);  // "rank_00000.json"
/// A file of one tensor that is not trained, by what it holds: "frozen_<hash>.safetensors". Saves share it as a link.
std::string frozen_name(const std::string& hash_text);
bool is_frozen_name(const std::string& name);
/// Whether a save owns the files of this name in a tag's folder; all others are the user's.
bool is_own_file(const std::string& name);

/// One save of one tag, the same on all its ranks. Another save of the tag has another nonce, so two jobs that save
/// one tag at once never write the same file.
struct SaveTarget {
  std::string directory;
  std::string tag;
  uint64_t nonce = 0;
  std::vector<std::string> folders = {};  // over which shards are cut; empty: they lie in the tag's folder
};
/// A new random nonce. One rank draws it, the caller shares it with the others.
uint64_t draw_nonce();
/// 16 hexadecimal digits.
std::string nonce_text(uint64_t nonce);

/// `<directory>/<tag>`. Errors: CheckpointError when `directory` is empty or `tag` is no plain folder name.
std::string folder_path(const std::string& directory, const std::string& tag);
/// `<directory>/<tag>.<nonce>.tmp`, where a save grows. Errors: as folder_path(), and when something that is not a
/// folder is at `<directory>/<tag>`.
std::string growing_path(const SaveTarget& target);
/// Removes the growing folders of other saves of the tag, which crashed, with those in `target.folders`. A save that
/// still runs in another job fails then: the removal is atomic for it, so it commits either all of its files or none.
void remove_other_saves(const SaveTarget& target);
/// Without "/." or "/" at its end; absolute if its last name is none otherwise, as that of ".".
std::string plain_path(const std::string& path);
/// `<directory>/latest`.
std::string latest_path(const std::string& directory);

}  // namespace deeptide::checkpoint
