// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Places flat buffers of one kind partly in memory, partly in files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/memory/memory.h"
#include "tiers/buffer.h"
#include "tiers/staging.h"
#include "tiers/swap_file.h"

namespace deeptide::tiers {

/// The folders of files, and how much memory reads and writes them.
struct OffloadOptions {
  std::vector<std::string> folders;
  int num_slots = 12;  // blocks in memory at a time
};

/// One rank's, on the CPU.
class Offload {
 public:
  /// `what`: the kind of buffer, for errors; `role`: what the ledger counts their memory as.
  /// Errors: RuntimeError naming a folder that cannot be used.
  Offload(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger, device::Role role, std::string what);

  /// A buffer (numel,) of zeros, of which the first `resident` elements are in memory: whole blocks, or all. Errors:
  /// RuntimeError naming the folder and the bytes when its disk is full.
  Buffer place(int64_t numel, int64_t resident, at::ScalarType dtype);

  int64_t staging_bytes() const { return staging_->nbytes(); }
  /// In the words of split_text.
  std::string text() const;

 private:
  std::shared_ptr<device::Ledger> ledger_;
  device::Role role_;
  std::string what_;
  std::shared_ptr<SwapFile> file_;
  std::shared_ptr<Staging> staging_;
  int64_t bytes_in_memory_ = 0;
  int64_t bytes_in_files_ = 0;
};

}  // namespace deeptide::tiers
