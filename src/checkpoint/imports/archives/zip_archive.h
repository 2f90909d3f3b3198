// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The entries of a zip file that are stored as they are, as torch.save writes them. Needs no torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {

/// Reads a zip file's directory, 64-bit ones too, without trusting it. Several threads may call const functions.
class ZipArchive {
 public:
  struct Span {
    int64_t offset = 0;  // bytes from the start of the file
    int64_t bytes = 0;
  };

  /// Errors: CheckpointError naming the file and what is wrong with it.
  explicit ZipArchive(const std::string& path);

  const File& file() const { return file_; }
  bool has(const std::string& name) const { return headers_.contains(name); }
  /// The bytes of an entry. Errors: CheckpointError when there is no such entry, or when it is compressed,
  /// encrypted or beyond the file.
  Span find(const std::string& name) const;
  /// The one name that ends in `end` ("/data.pkl"). Errors: CheckpointError when there is none, or several.
  std::string name_with_end(const std::string& end) const;

 private:
  struct Header {
    int64_t offset = 0;  // of the entry's own header
    int64_t bytes = 0;
    bool stored = false;
  };

  void read_directory();
  void add_record(const std::string& directory, size_t& position);

  File file_;
  int64_t file_bytes_;
  std::map<std::string, Header> headers_;
};

}  // namespace deeptide::checkpoint
