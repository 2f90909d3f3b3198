// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes zip archives as torch.save does: stored records, aligned to 64 bytes, of any size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {

/// An archive from byte `start` of a file on, with its records in the order of begin(). Source: PKWARE's
/// APPNOTE 6.3.10, sections 4.3 and 4.5.3 (zip64).
class ZipFile {
 public:
  ZipFile(const File& file, int64_t start) : file_(file), start_(start), offset_(start) {}
  /// Begins a record of exactly `bytes`, which append() fills.
  void begin(const std::string& name, int64_t bytes);
  void append(const void* data, int64_t bytes);
  void add(const std::string& name, const std::string& contents);
  /// Writes the directory, without which it is no archive. Returns where it ends in the file.
  int64_t finish();

 private:
  struct Record {
    std::string name;
    int64_t bytes = 0;
    int64_t offset = 0;  // of its header in the archive
    uint32_t crc = 0;
  };

  void end_record();
  void write(const std::string& bytes);

  const File& file_;
  std::vector<Record> records_;
  int64_t start_;
  int64_t offset_;  // in the file
  bool open_ = false;
};

}  // namespace deeptide::checkpoint
