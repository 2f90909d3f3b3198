// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Places optimizer states in memory and in files, by a ratio.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/memory.h"
#include "tiers/staging.h"
#include "tiers/swap_file.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::zero {

/// How much of the states goes to files, and through how much memory.
struct OffloadOptions {
  std::vector<std::string> folders;
  double ratio = 1.0;  // of all elements
  int num_slots = 12;  // blocks in memory at a time
};

/// Cuts one state after another, so that the share in files over all of them is `ratio`, to half a block.
class StateSplit {
 public:
  explicit StateSplit(double ratio) : ratio_(ratio) {}
  /// Returns how many of the next state's elements stay in memory.
  int64_t resident(int64_t numel);
  int64_t numel() const { return numel_; }
  int64_t numel_in_files() const { return numel_in_files_; }

 private:
  double ratio_;
  int64_t numel_ = 0;
  int64_t numel_in_files_ = 0;
};

/// Places states as StateSplit cuts them. One rank's, on the CPU.
class OffloadedStates {
 public:
  /// Errors: RuntimeError naming a folder that cannot be used.
  OffloadedStates(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger);

  /// An fp32 state. Errors: RuntimeError naming the folder and the bytes when its disk is full.
  tiers::Buffer place(int64_t numel);

  int64_t bytes_in_memory() const { return (split_.numel() - split_.numel_in_files()) * kElementBytes; }
  int64_t bytes_in_files() const { return split_.numel_in_files() * kElementBytes; }
  int64_t staging_bytes() const { return staging_->nbytes(); }
  /// As tiers::split_text.
  std::string text() const;

 private:
  static constexpr int64_t kElementBytes = sizeof(float);

  StateSplit split_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<tiers::SwapFile> file_;
  std::shared_ptr<tiers::Staging> staging_;
};

}  // namespace deeptide::zero
