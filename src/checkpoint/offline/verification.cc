// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads every byte of a checkpoint and says which tensors are damaged.
#include <algorithm>
#include <memory>
#include <set>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/load/extent_reader.h"
#include "checkpoint/offline/writers/parts.h"
#include "deeptide/errors.h"

namespace deeptide {

namespace {

using checkpoint::Contents;
using checkpoint::Extent;
using checkpoint::Logical;
using checkpoint::Region;

class Nowhere final : public checkpoint::ElementSink {
 public:
  Nowhere(int64_t width, const std::function<void(int64_t)>& count) : width_(width), count_(count) {}
  char* memory(int64_t) override { return nullptr; }
  void put(int64_t, const char*, int64_t count) override { count_(count * width_); }

 private:
  int64_t width_;
  const std::function<void(int64_t)>& count_;
};

// Elements that no extent holds. Extents do not overlap, so their numbers tell.
std::string gap_of(const Logical& logical) {
  int64_t missing = checkpoint::numel_of(logical.shape, logical.key);
  for (const Extent& extent : logical.extents) missing -= extent.region.numel();
  if (missing == 0) return "";
  return "'" + logical.key + "' is not whole: " + std::to_string(missing) + " of its elements are in no file";
}

// Files that another process removed meanwhile are no damage: a removal renames the folder before anything else.
void check_is_there(const std::string& folder, const std::vector<std::string>& faults) {
  if (faults.empty() || checkpoint::exists(folder + "/" + checkpoint::kManifestName)) return;
  throw CheckpointError("the checkpoint " + folder +
                        " was removed while it was read, by keep_last or prune; choose one that stays");
}

}  // namespace

std::vector<std::string> verify_checkpoint(const std::string& directory, const std::string& tag,
                                           const CheckpointProgress& progress) {
  const std::string folder = checkpoint::find_folder(directory, tag);
  Contents contents;
  try {
    contents = checkpoint::read_manifest(folder);
  } catch (const CheckpointError& error) {
    check_is_there(folder, {error.what()});
    return {error.what()};
  }
  std::vector<std::string> faults = shard_faults(contents);
  int64_t total = 0, done = 0;
  checkpoint::StreamedReads files(folder);
  for (const auto& [id, logical] : contents.table.tensors) {
    for (const Extent& extent : logical.extents) {
      announce_shared(files, logical, extent, extent.region);
      total += extent.region.numel() * checkpoint::element_bytes(logical.dtype);
    }
  }
  const std::function<void(int64_t)> count = [&](int64_t bytes) {
    done += bytes;
    if (progress) progress(done, total);
  };
  for (const auto& [id, logical] : contents.table.tensors) {
    if (const std::string gap = gap_of(logical); !gap.empty()) faults.push_back(gap);
    for (const Extent& extent : logical.extents) {
      try {
        Nowhere nowhere(checkpoint::element_bytes(logical.dtype), count);
        read_shared(files, logical, extent, extent.region, nowhere);
      } catch (const CheckpointError& error) {
        // A file that cannot be read has its line already, unless only these bytes cannot.
        const std::string line = error.what();
        faults.push_back(line.find("'" + logical.key + "'") == 0 ? line : "'" + logical.key + "': " + line);
      }
    }
  }
  check_is_there(folder, faults);
  return faults;
}

}  // namespace deeptide
