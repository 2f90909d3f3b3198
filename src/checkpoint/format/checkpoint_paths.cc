// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names a checkpoint's folders and files, and the tags that may name them.
#include "checkpoint/format/checkpoint_paths.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>
#include <string_view>
#include <vector>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/part_folders.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kLatest = "latest";
constexpr std::string_view kGrowing = ".tmp";
constexpr std::string_view kShard = ".safetensors";
constexpr std::string_view kTable = ".json";
constexpr std::string_view kFrozen = "frozen_";
constexpr size_t kNonceDigits = 16;
constexpr size_t kHashDigits = 32;

std::string numbered(int rank, std::string_view suffix) {
  char text[32];
  std::snprintf(text, sizeof(text), "rank_%05d", rank);
  return text + std::string(suffix);
}

// Takes `part` off the text's end; false when the text does not end so.
bool strip_end(std::string_view& text, std::string_view part) {
  if (!text.ends_with(part)) return false;
  text.remove_suffix(part.size());
  return true;
}

bool is_plain_name(const std::string& tag) {
  const bool control = std::any_of(tag.begin(), tag.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  return !tag.empty() && !control && tag != "." && tag.find('/') == std::string::npos &&
         tag.find("..") == std::string::npos;
}

// "<tag>.<nonce>.tmp", with a second ".tmp" while remove_other_saves() removes it.
bool is_growing_name(std::string_view name, const std::string& tag) {
  if (!name.starts_with(tag)) return false;
  name.remove_prefix(tag.size());
  if (!strip_end(name, kGrowing)) return false;
  strip_end(name, kGrowing);
  return name.size() == 1 + kNonceDigits && name[0] == '.' &&
         name.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
}

// "<tag>.tmp", as saves of version 1 grew. A user may have a folder of this name too, but not with our files alone.
bool is_growing_folder_v1(const std::string& path, std::string_view name, const std::string& tag) {
  if (name != tag + std::string(kGrowing) || !is_folder(path)) return false;
  const std::vector<std::string> files = list_folder(path);
  return !files.empty() && std::all_of(files.begin(), files.end(), is_own_file);
}

bool is_number(std::string_view text, size_t least_digits) {
  return text.size() >= least_digits && text.find_first_not_of("0123456789") == std::string_view::npos;
}

void remove_other_saves_in(const std::string& directory, const std::string& tag, const std::string& own) {
  for (const std::string& name : list_folder(directory)) {
    std::string path = (std::filesystem::path(directory) / name).string();
    const bool growing = is_growing_name(name, tag) || is_growing_folder_v1(path, name, tag);
    if (!growing || name == own) continue;
    if (!name.ends_with(".tmp.tmp")) {
      // The other save may be about to move its folder into place: it must move all of it or find it gone.
      const std::string claimed = path + std::string(kGrowing);
      remove_with_parts(claimed);
      if (!move_quietly(path, claimed)) continue;
      path = claimed;
    }
    remove_with_parts(path);
  }
}

}  // namespace

std::string shard_name(int rank, int part) {
  return numbered(rank, (part == 0 ? "" : "-" + std::to_string(part)) + std::string(kShard));
}
std::string rank_table_name(int rank) { return numbered(rank, kTable); }

std::string frozen_name(const std::string& hash_text) { return std::string(kFrozen) + hash_text + std::string(kShard); }

bool is_frozen_name(const std::string& name) {
  std::string_view digits = name;
  if (!digits.starts_with(kFrozen) || !strip_end(digits, kShard)) return false;
  digits.remove_prefix(kFrozen.size());
  return digits.size() == kHashDigits && digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_own_file(const std::string& name) {
  if (name == kManifestName || name == kGrowingLatest || is_frozen_name(name)) return true;
  std::string_view digits = name;
  if (!digits.starts_with("rank_") || !(strip_end(digits, kShard) || strip_end(digits, kTable))) return false;
  digits.remove_prefix(5);
  const size_t dash = digits.find('-');
  return is_number(digits.substr(0, dash), 5) &&
         (dash == std::string_view::npos || is_number(digits.substr(dash + 1), 1));
}

uint64_t draw_nonce() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

std::string nonce_text(uint64_t nonce) {
  char text[kNonceDigits + 1];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(nonce));
  return text;
}

std::string folder_path(const std::string& directory, const std::string& tag) {
  if (directory.empty()) throw CheckpointError("the checkpoint folder's path is empty; name one, '.' for the current");
  if (!is_plain_name(tag)) {
    throw CheckpointError("the tag '" + tag +
                          "' cannot name a folder: got '/', '..', a control character or nothing, " +
                          "expected a plain name such as 'step100'");
  }
  if (tag == kLatest || tag.ends_with(kGrowing) || tag.ends_with(aside_path(""))) {
    throw CheckpointError("the tag '" + tag + "' is reserved ('latest', '*.tmp', '*" + aside_path("") +
                          "'); choose another one");
  }
  return (std::filesystem::path(directory) / tag).string();
}

std::string growing_path(const SaveTarget& target) {
  const std::string folder = folder_path(target.directory, target.tag);
  if (exists(folder) && !is_folder(folder)) {
    throw CheckpointError("cannot save to " + folder + ": it is not a folder; choose another tag or folder");
  }
  return folder + "." + nonce_text(target.nonce) + std::string(kGrowing);
}

void remove_other_saves(const SaveTarget& target) {
  const std::string own = std::filesystem::path(growing_path(target)).filename();
  remove_other_saves_in(target.directory, target.tag, own);
  for (const std::string& folder : target.folders) {
    const std::string home = home_of_parts(target.directory, folder);
    if (is_folder(home)) remove_other_saves_in(home, target.tag, own);
  }
}

std::string plain_path(const std::string& path) {
  const auto without_end = [](const std::filesystem::path& whole) {
    const std::filesystem::path normal = whole.lexically_normal();
    return normal.has_filename() ? normal : normal.parent_path();
  };
  const std::filesystem::path plain = without_end(path);
  const bool is_named = plain.has_filename() && plain.filename() != "." && plain.filename() != "..";
  return (is_named ? plain : without_end(std::filesystem::absolute(path))).string();
}

std::string latest_path(const std::string& directory) { return (std::filesystem::path(directory) / kLatest).string(); }

}  // namespace deeptide::checkpoint
