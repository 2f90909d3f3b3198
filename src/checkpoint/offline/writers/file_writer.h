// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writers of exported files, and where they count what they did.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/offline/writers/pickle_writer.h"
#include "checkpoint/offline/writers/selection.h"
#include "checkpoint/offline/writers/torch_file.h"

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
/// A dict of tensors as torch.save writes it.
void write_torch_file(const CheckpointReader& reader, const ExportFile& items, const std::string& path, Meter& meter);
/// Likewise DeepSpeed's universal layout: the folder `folder`, made anew, for weights, moments, hyper-parameters and
/// counters. Frozen weights lie in the module's state, as buffers do.
void write_universal_folder(const CheckpointReader& reader, const std::string& folder,
                            const CheckpointProgress& progress);

/// Likewise torch.distributed.checkpoint's, into `folder`, which exists: weights, moments, steps and hyper-parameters.
/// Returns the names of its files; the first makes it a checkpoint.
std::vector<std::string> write_dcp_folder(const CheckpointReader& reader, const std::string& folder,
                                          const CheckpointProgress& progress);

/// The parts of a torch file: what tells of an item, or of several as a dict by name, and their elements. Errors:
/// CheckpointError for a type that torch has no storage for.
void pickle_tensor(const ExportItem& item, const std::string& path, PickleWriter& pickle);
void pickle_tensors(const ExportFile& items, const std::string& path, PickleWriter& pickle);
void append_tensors(const CheckpointReader& reader, const ExportFile& items, TorchArchive& archive, Meter& meter);

}  // namespace deeptide::checkpoint
