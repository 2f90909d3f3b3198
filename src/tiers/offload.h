// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Places flat buffers of one kind partly in memory, partly in files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/memory.h"
#include "tiers/buffer.h"
#include "tiers/staging.h"
#include "tiers/swap_file.h"

namespace deeptide::tiers {

/// How much goes to files, and through how much memory.
struct OffloadOptions {
  std::vector<std::string> folders;
  double ratio = 1.0;  // of all bytes
  int num_slots = 12;  // blocks in memory at a time
};

/// Cuts one buffer after another, so that the share in files over all of them is `ratio`, to half a block.
class Split {
 public:
  explicit Split(double ratio) : ratio_(ratio) {}
  /// Returns how many of the next buffer's elements stay in memory: whole blocks, or all.
  int64_t resident(int64_t numel, at::ScalarType dtype);
  int64_t bytes_in_memory() const { return bytes_ - bytes_in_files_; }
  int64_t bytes_in_files() const { return bytes_in_files_; }

 private:
  double ratio_;
  int64_t bytes_ = 0;
  int64_t bytes_in_files_ = 0;
};

/// One rank's, on the CPU.
class Offload {
 public:
  /// `what`: the kind of buffer, for errors; `role`: what the ledger counts their memory as.
  /// Errors: RuntimeError naming a folder that cannot be used.
  Offload(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger, device::Role role, std::string what);

  /// A buffer (numel,) of zeros. Errors: RuntimeError naming the folder and the bytes when its disk is full.
  Buffer place(int64_t numel, at::ScalarType dtype);

  int64_t staging_bytes() const { return staging_->nbytes(); }
  /// Returns the text of split_text for this split.
  std::string text() const;

 private:
  Split split_;
  std::shared_ptr<device::Ledger> ledger_;
  device::Role role_;
  std::string what_;
  std::shared_ptr<SwapFile> file_;
  std::shared_ptr<Staging> staging_;
};

}  // namespace deeptide::tiers
