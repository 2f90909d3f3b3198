// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds the parts of an open CheckpointReader, and reads its tensors block by block.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/contents.h"
#include "checkpoint/load/streamed_reads.h"
#include "deeptide/checkpoint.h"

struct deeptide::CheckpointReader::Parts {
  checkpoint::Contents contents;
  std::vector<CheckpointTensor> tensors;
  std::map<std::pair<std::string, std::string>, const checkpoint::Logical*> logicals;  // by name and role
  int64_t global_steps = -1;

  /// Errors: CheckpointError when the reader has no such tensor.
  const checkpoint::Logical& logical(const CheckpointTensor& tensor) const;
};

namespace deeptide::checkpoint {

/// Lists the tensors of what was opened.
std::shared_ptr<const CheckpointReader::Parts> parts_of(Contents contents);

/// Finds the folder for CheckpointReader. Errors: CheckpointError when there is none.
std::string find_folder(const std::string& directory, const std::string& tag);

/// "optimizer steps" of a manifest's state; -1 without.
int64_t global_steps_of(const Manifest& manifest);

/// Reads a tensor in order, in blocks of at most kHashedBlockBytes that end where hashed blocks of its pieces end, so
/// that each byte is read and checked once. `data` is valid during the call.
void for_each_block(const CheckpointReader& reader, const CheckpointTensor& tensor,
                    const std::function<void(int64_t begin, int64_t count, const char* data)>& visit);
/// Likewise, of tensors that were announced whole, one after the other.
void for_each_block(const CheckpointReader& reader, const CheckpointTensor& tensor, StreamedReads& files,
                    const std::function<void(int64_t begin, int64_t count, const char* data)>& visit);

}  // namespace deeptide::checkpoint
