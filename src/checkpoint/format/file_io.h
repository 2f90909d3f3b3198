// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Files and folders: every failure is a CheckpointError with path, bytes, errno's text and the cure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide::checkpoint {

/// An open file. Positions are explicit, so several threads may read one File at once.
class File {
 public:
  static File create(const std::string& path);  // truncates what is there
  static File open(const std::string& path);    // to read
  /// Likewise. Reads bypass the page cache where is_direct(); then io::kAlignment holds for them.
  static File open_direct(const std::string& path);
  /// Truncates. Writes bypass the page cache where the filesystem can; then io::kAlignment holds for them.
  static File create_direct(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  int64_t size() const;
  void write_at(const void* data, int64_t bytes, int64_t offset) const;
  /// Errors: CheckpointError also when the file ends before `offset + bytes`.
  void read_at(void* data, int64_t bytes, int64_t offset) const;
  /// Whether the page cache has at least half of them; also true where the system does not tell.
  bool is_cached(int64_t bytes, int64_t offset) const;
  /// Lets the system fetch what is read soon, while this thread does other things. A hint, which may do nothing.
  void will_read(int64_t bytes, int64_t offset) const;
  /// Lets the system begin to write what `sync` will wait for. A hint, likewise.
  void will_sync(int64_t bytes, int64_t offset) const;
  void sync() const;
  /// Makes the file `bytes` long.
  void cut(int64_t bytes) const;
  int descriptor() const { return descriptor_; }
  bool is_direct() const { return direct_; }

 private:
  File(std::string path, int descriptor, bool direct = false);
  std::string path_;
  int descriptor_;
  bool direct_;
};

/// For tests: from now on asked before the kernel is, it returns the error number with which an action ("write",
/// "flush", "create", "move", "create the folder") on a path fails; 0: it goes on. Null: nobody is asked.
using Refuse = int (*)(const char* action, const std::string& path);
void refuse_with(Refuse refuse);
int refusal(const char* action, const std::string& path);

/// Errors: CheckpointError "cannot <action> <path>: <errno's text>", with the cure where there is one.
[[noreturn]] void fail(const std::string& action, const std::string& path, int error);

std::string read_text(const std::string& path);
/// Writes and fsyncs.
void write_text(const std::string& path, const std::string& text);

/// Whether anything is there, also a link that leads nowhere.
bool exists(const std::string& path);
/// Follows links.
bool is_folder(const std::string& path);
void make_folders(const std::string& path);
/// Makes the folder's entries durable.
void sync_folder(const std::string& path);
/// The names in the folder, in no order.
std::vector<std::string> list_folder(const std::string& path);
void move_path(const std::string& from, const std::string& to);
/// False when it cannot be moved.
bool move_quietly(const std::string& from, const std::string& to) noexcept;
/// Removes a file or a tree; what cannot be removed stays.
void remove_quietly(const std::string& path) noexcept;

/// The path where replace_folder() keeps the old folder when the new one takes its place in two steps.
std::string aside_path(const std::string& path);
/// Puts folder `from` in the place of `to`. With `exchange`, and a filesystem that can, the two swap in one step; else
/// the old folder is moved aside first, and moved back when the second step fails. Durable on return.
/// Returns where the old folder is now, for the caller to remove; empty when there was none.
[[nodiscard]] std::string replace_folder(const std::string& from, const std::string& to, bool exchange = true);

}  // namespace deeptide::checkpoint
