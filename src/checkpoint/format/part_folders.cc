// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names, links, moves and removes the parts of shards.
#include "checkpoint/format/part_folders.h"

#include <unistd.h>

#include <cerrno>
#include <exception>
#include <filesystem>
#include <set>
#include <system_error>

#include "checkpoint/format/content_hash.h"
#include "checkpoint/format/file_io.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kHomeDigits = 8;
constexpr size_t kSaveDigits = 16;

fs::path whole_path(const std::string& path) {
  fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

// "<tag>.<nonce>"
bool is_name_of_parts(const std::string& name) {
  if (name.size() < kSaveDigits + 2) return false;
  const size_t dot = name.size() - kSaveDigits - 1;
  return name[dot] == '.' && name.find_first_not_of("0123456789abcdef", dot + 1) == std::string::npos;
}

// The folders that the links of a checkpoint lead to. A link that is not of a save leads nowhere here.
std::set<fs::path> linked_folders(const std::string& folder) {
  std::set<fs::path> found;
  std::error_code ignored;
  for (const auto& item : fs::directory_iterator(folder, ignored)) {
    if (!item.is_symlink(ignored) || !is_own_file(item.path().filename())) continue;
    const fs::path place = fs::read_symlink(item.path(), ignored);
    const bool is_part = place.filename() == item.path().filename() && is_name_of_parts(place.parent_path().filename());
    if (is_part) found.insert(place.parent_path());
  }
  return found;
}

// With its parent, where nothing else is in it.
void remove_folder_of_parts(const fs::path& folder) noexcept {
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  fs::remove(folder.parent_path(), ignored);
}

}  // namespace

std::string home_of_parts(const std::string& directory, const std::string& folder) {
  if (folder.empty()) throw CheckpointError("checkpoint.folders has an empty name; name a folder, '.' for the current");
  const fs::path whole = whole_path(directory);
  const std::string text = whole.string();
  const std::string hash = ContentHash::of(text.data(), static_cast<int64_t>(text.size())).text();
  return (whole_path(folder) / (whole.filename().string() + "-" + hash.substr(0, kHomeDigits))).string();
}

std::string growing_parts(const SaveTarget& target, const std::string& folder) {
  return growing_path({home_of_parts(target.directory, folder), target.tag, target.nonce});
}

std::string settled_parts(const SaveTarget& target, const std::string& folder) {
  return folder_path(home_of_parts(target.directory, folder), target.tag) + "." + nonce_text(target.nonce);
}

void link_part(const SaveTarget& target, const std::string& folder, const std::string& name) {
  const std::string link = growing_path(target) + "/" + name;
  remove_quietly(link);  // of an earlier call that failed
  const std::string place = settled_parts(target, folder) + "/" + name;
  if (::symlink(place.c_str(), link.c_str()) != 0) fail("create the link", link, errno);
}

void settle_parts(const SaveTarget& target) {
  for (const std::string& folder : target.folders) {
    const std::string settled = settled_parts(target, folder);
    if (exists(settled)) continue;  // hosts with folders of their own may share this one
    move_path(growing_parts(target, folder), settled);
    sync_folder(home_of_parts(target.directory, folder));
  }
  if (target.folders.empty()) return;
  const std::string growing = growing_path(target);
  for (const std::string& name : list_folder(growing)) {
    std::error_code ignored;
    const fs::path path = fs::path(growing) / name;
    if (!is_own_file(name) || !fs::is_symlink(path, ignored) || fs::exists(path, ignored)) continue;
    throw CheckpointError("cannot commit " + folder_path(target.directory, target.tag) + ": " + name +
                          " leads to no file here; give checkpoint.folders that every rank sees, or set " +
                          "checkpoint.use_node_local_storage");
  }
}

void remove_parts(const SaveTarget& target) noexcept {
  try {
    // A save that failed after its checkpoint was in its place, as it moved `latest`, keeps what that has.
    const std::set<fs::path> kept = linked_folders(folder_path(target.directory, target.tag));
    for (const std::string& folder : target.folders) {
      remove_folder_of_parts(growing_parts(target, folder));
      const fs::path settled = settled_parts(target, folder);
      if (!kept.contains(settled)) remove_folder_of_parts(settled);
    }
  } catch (const std::exception&) {  // a save that could not be named left nothing behind
  }
}

void remove_with_parts(const std::string& folder) noexcept {
  try {
    for (const fs::path& parts : linked_folders(folder)) remove_folder_of_parts(parts);
  } catch (const std::exception&) {  // what remains is removed all the same
  }
  remove_quietly(folder);
}

}  // namespace deeptide::checkpoint
