// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Places the shards of sharded units on a device, in the host's memory, or in files: the first ones first.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/config.h"
#include "device/memory/memory.h"
#include "device/memory/page_locked.h"
#include "sharding/layout.h"
#include "tiers/buffer.h"
#include "tiers/copied_store.h"
#include "tiers/staging.h"
#include "tiers/swap_file.h"

namespace deeptide::zero {

/// The part of this rank's shards that stays in memory: the first units first. Units: elements.
struct ParameterOffload {
  std::optional<MemoryShare> on_device = {};  // of their bytes, whole shards only; absent: none
  std::vector<std::string> folders;           // empty: all stays in memory
  int64_t max_in_memory = 0;
  MemoryShare memory = {0.0, 0};  // and of their bytes, those on a device included
  int64_t num_buffers = 5;        // each takes a shard
  int64_t buffer_numel = 0;       // a larger shard passes in parts
};

/// Memory and files for the units' shards. Units: bytes of one rank.
struct ParameterForecast {
  int64_t device_bytes = 0;   // of shards that stay on a device
  int64_t memory_bytes = 0;   // of elements that stay
  int64_t staging_bytes = 0;  // through which the others pass
  int64_t file_bytes = 0;
};
/// The place of one shard. Units: elements. The rest, neither on a device nor resident, is in files.
struct ShardPlace {
  bool on_device = false;  // all of it
  int64_t resident = 0;    // in the memory of the CPU or of the device's host
};
/// By unit. `layouts`: of those that are sharded.
std::vector<ShardPlace> place_shards(const ParameterOffload& options,
                                     const std::vector<const sharding::UnitLayout*>& layouts);
/// `on_cpu`: whether the units are a CPU's. Those of a device need page-locked memory.
ParameterForecast forecast(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts,
                           const std::vector<ShardPlace>& places, bool on_cpu);

/// One rank's. Those in the host's memory: a device's copies read and write it where it is page-locked. What passes
/// through memory is bounded: `num_buffers` shards of the largest unit, each of at most `buffer_numel` elements.
class OffloadedParameters {
 public:
  /// `layouts`: of the units to place; `places`, `device`: theirs. Errors: RuntimeError naming a folder that cannot be
  /// used.
  OffloadedParameters(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts,
                      const std::vector<ShardPlace>& places, std::shared_ptr<device::Ledger> ledger, at::Device device);

  /// Makes the buffer (shard,), which lies at its place; values are undefined. Errors: RuntimeError naming the
  /// folder and the bytes when its disk is full.
  tiers::Buffer place(const sharding::UnitLayout& layout, const ShardPlace& place);

  bool uses_files() const { return file_ != nullptr; }
  /// Memory through which shards pass; 0: none does.
  int64_t staging_bytes() const { return staging_ ? staging_->nbytes() : 0; }
  /// Bytes of the host's memory beside a device's.
  int64_t off_device_bytes() const { return locked_ ? locked_->nbytes() + staging_bytes() : 0; }
  /// In the words of tiers::split_text.
  std::string text() const;

 private:
  at::Device device_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<tiers::SwapFile> file_;        // null: all stays in memory
  std::shared_ptr<tiers::Staging> staging_;      // likewise
  std::unique_ptr<device::PageLocked> locked_;   // of what stays; null: the units are the CPU's
  std::shared_ptr<tiers::ReadsUnderWay> reads_;  // likewise
  int64_t bytes_on_device_ = 0;
  int64_t bytes_in_memory_ = 0;
  int64_t bytes_in_files_ = 0;
};

}  // namespace deeptide::zero
