// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes files as torch.save does: a zip of a pickle and of one record per tensor.
#pragma once

#include <string>

#include "checkpoint/offline/writers/zip_file.h"

namespace deeptide::checkpoint {

/// Records are aligned to 64 bytes. Fsynced by finish(), without which the file is no archive.
class TorchArchive {
 public:
  /// Begins with the pickle, which tells of the tensors.
  TorchArchive(const std::string& path, const std::string& pickle);
  /// Begins the next tensor's elements, exactly `bytes` of them, which append() gives.
  void begin_tensor(int64_t bytes);
  void append(const void* data, int64_t bytes) { zip_.append(data, bytes); }
  void finish();

 private:
  ZipFile zip_;
  int64_t num_tensors_ = 0;
};

}  // namespace deeptide::checkpoint
