// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The user's files in a tag's folder, which a new save of the tag keeps.
#include "checkpoint/save/user_files.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {
namespace {

namespace fs = std::filesystem;

// A hard link costs no space, and a program that has the file open keeps writing to it.
void keep_file(const std::string& from, const std::string& to) {
  if (::link(from.c_str(), to.c_str()) == 0) return;
  if (errno == EEXIST || errno == ENOENT) return;  // kept before, or deleted by the user just now
  std::error_code error;
  fs::copy(from, to, fs::copy_options::copy_symlinks, error);
  if (error) fail("keep", from, error.value());
  if (!fs::is_symlink(fs::symlink_status(to))) File::open(to).sync();
}

void keep(const std::string& from, const std::string& to) {
  if (fs::is_symlink(fs::symlink_status(from)) || !is_folder(from)) {
    keep_file(from, to);
    return;
  }
  std::error_code error;
  fs::create_directory(to, from, error);  // with the permissions of `from`
  if (error) fail("create the folder", to, error.value());
  for (const std::string& name : list_folder(from)) keep(from + "/" + name, to + "/" + name);
  sync_folder(to);
}

}  // namespace

void keep_user_files(const std::string& from, const std::string& to) {
  for (const std::string& name : list_folder(from)) {
    if (!is_own_file(name)) keep(from + "/" + name, to + "/" + name);
  }
}

}  // namespace deeptide::checkpoint
