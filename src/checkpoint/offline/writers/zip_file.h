// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes zip archives as torch.save does: stored records, aligned to 64 bytes, of any size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {

/// Records in the order of begin(). Source: PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3 (zip64).
class ZipFile {
 public:
  explicit ZipFile(File file) : file_(std::move(file)) {}
  /// Begins a record of exactly `bytes`, which append() fills.
  void begin(const std::string& name, int64_t bytes);
  void append(const void* data, int64_t bytes);
  void add(const std::string& name, const std::string& contents);
  /// Writes the directory and fsyncs. Without it the file is no archive.
  void finish();

 private:
  struct Record {
    std::string name;
    int64_t bytes = 0;
    int64_t offset = 0;  // of its header in the file
    uint32_t crc = 0;
  };

  void end_record();
  void write(const std::string& bytes);

  File file_;
  std::vector<Record> records_;
  int64_t offset_ = 0;
  bool open_ = false;
};

}  // namespace deeptide::checkpoint
