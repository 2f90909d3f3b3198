// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A file in memory, page by page as it is used.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide::checkpoint {

/// A file in private pages: a copy of what is written, the file's own of the rest. A forked child may use it as its
/// own.
class MappedFile {
 public:
  /// Errors: CheckpointError naming the file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* at(int64_t offset) const { return base_ + offset; }

 private:
  int64_t bytes_;
  char* base_ = nullptr;
};

}  // namespace deeptide::checkpoint
