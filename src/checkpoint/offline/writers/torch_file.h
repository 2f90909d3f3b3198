// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes files as torch.save does: a zip of a pickle and of one record per tensor.
#pragma once

#include <functional>
#include <string>

#include "checkpoint/offline/writers/zip_file.h"

namespace deeptide::checkpoint {

/// Records are aligned to 64 bytes of the archive, which begins at byte `start` of a file.
class TorchArchive {
 public:
  /// Begins with the pickle, which tells of the tensors.
  TorchArchive(const File& file, int64_t start, const std::string& pickle);
  /// Begins the next tensor's elements, exactly `bytes` of them, which append() gives.
  void begin_tensor(int64_t bytes);
  void append(const void* data, int64_t bytes) { zip_.append(data, bytes); }
  /// Writes what makes it an archive. Returns where it ends in the file.
  int64_t finish();

 private:
  ZipFile zip_;
  int64_t num_tensors_ = 0;
};

/// Writes a file that is one archive, whose tensors `append` gives, and fsyncs it.
void write_archive(const std::string& path, const std::string& pickle,
                   const std::function<void(TorchArchive&)>& append);

}  // namespace deeptide::checkpoint
