// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writers of exported files, and where they count what they did.
#pragma once

#include <string>

#include "checkpoint/offline/writers/selection.h"

namespace deeptide::checkpoint {

/// Adds up the bytes done over several files and tells the caller.
class Meter {
 public:
  Meter(const CheckpointProgress& progress, int64_t total) : progress_(progress), total_(total) { add(0); }
  void add(int64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

 private:
  const CheckpointProgress& progress_;
  int64_t total_;
  int64_t done_ = 0;
};

/// Write one file, fsynced. Memory: three blocks of kHashedBlockBytes, and kBufferBytes for safetensors. Errors:
/// CheckpointError.
void write_safetensors_file(const CheckpointReader& reader, const ExportFile& items, const std::string& path,
                            Meter& meter);
/// A dict of tensors as torch.save writes it: a zip of a pickle and of one record per tensor, aligned to 64 bytes.
void write_torch_file(const CheckpointReader& reader, const ExportFile& items, const std::string& path, Meter& meter);

}  // namespace deeptide::checkpoint
