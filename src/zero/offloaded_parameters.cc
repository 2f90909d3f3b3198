// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sizes the memory that shards lie in or pass through, and reserves their files.
#include "zero/offloaded_parameters.h"

#include <algorithm>

#include "base/text.h"
#include "io/queue.h"
#include "tiers/file_store.h"

namespace deeptide::zero {

using tiers::Buffer;

namespace {

int64_t item_size(const sharding::UnitLayout& layout) { return static_cast<int64_t>(c10::elementSize(layout.dtype)); }

/// One block to be read or written while another is in use, at least.
int num_slots(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts) {
  constexpr int64_t kFewest = 2;
  int64_t blocks = 0;
  for (const sharding::UnitLayout* layout : layouts) {
    const int64_t bytes = std::min(layout->shard, options.buffer_numel) * item_size(*layout);
    blocks = std::max(blocks, (bytes + tiers::kSwapBlockBytes - 1) / tiers::kSwapBlockBytes);
  }
  return static_cast<int>(std::max(kFewest, options.num_buffers * blocks));
}

/// Returns how many bytes of all shards may stay in memory.
int64_t bytes_allowed(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts) {
  int64_t total = 0, first = 0, left = options.max_in_memory;
  for (const sharding::UnitLayout* layout : layouts) {
    const int64_t counted = std::min(layout->shard, left);
    left -= counted;
    first += counted * item_size(*layout);
    total += layout->shard * item_size(*layout);
  }
  return std::min(total, first + options.memory.of(total));
}

/// Takes from `left` bytes the elements of a shard that stay in memory: all, or whole blocks.
int64_t take_resident(const sharding::UnitLayout& layout, int64_t& left) {
  int64_t resident = std::min(layout.shard, left / item_size(layout));
  if (resident < layout.shard) resident -= resident % tiers::swap_block_numel(layout.dtype);
  left -= resident * item_size(layout);
  return resident;
}

/// The bytes of each shard that stay in memory.
std::vector<int64_t> resident_bytes(const ParameterOffload& options,
                                    const std::vector<const sharding::UnitLayout*>& layouts) {
  std::vector<int64_t> bytes;
  int64_t left = bytes_allowed(options, layouts);
  for (const sharding::UnitLayout* layout : layouts) {
    bytes.push_back(take_resident(*layout, left) * item_size(*layout));
  }
  return bytes;
}

}  // namespace

ParameterForecast forecast(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts,
                           bool on_cpu) {
  ParameterForecast bytes;
  if (!options.folders.empty()) bytes.staging_bytes = num_slots(options, layouts) * tiers::kSwapBlockBytes;
  const std::vector<int64_t> resident = resident_bytes(options, layouts);
  for (size_t i = 0; i < layouts.size(); ++i) {
    bytes.memory_bytes += resident[i];
    bytes.file_bytes += layouts[i]->shard * item_size(*layouts[i]) - resident[i];
  }
  if (!on_cpu) bytes.memory_bytes = device::PageLocked::forecast(resident);
  return bytes;
}

OffloadedParameters::OffloadedParameters(const ParameterOffload& options,
                                         const std::vector<const sharding::UnitLayout*>& layouts,
                                         std::shared_ptr<device::Ledger> ledger, at::Device device)
    : left_in_memory_(bytes_allowed(options, layouts)), ledger_(std::move(ledger)) {
  const auto role = device.is_cpu() ? device::Role::parameters : device::Role::host_parameters;
  const int slots = num_slots(options, layouts);
  if (!device.is_cpu()) {
    locked_ = std::make_unique<device::PageLocked>(ledger_, role, resident_bytes(options, layouts));
    // One block stays free for whoever leases one.
    reads_ = std::make_shared<tiers::ReadsUnderWay>(options.folders.empty() ? INT64_MAX : slots - 1);
  }
  if (options.folders.empty()) return;
  file_ = std::make_shared<tiers::SwapFile>(options.folders);
  constexpr int kMostInFlight = 64;
  staging_ = std::make_shared<tiers::Staging>(io::make_queue(std::min(slots, kMostInFlight)), slots, ledger_, role,
                                              /*page_locked=*/!device.is_cpu());
}

Buffer OffloadedParameters::place(const sharding::UnitLayout& layout) {
  const int64_t resident = take_resident(layout, left_in_memory_);
  bytes_in_memory_ += resident * item_size(layout);
  bytes_in_files_ += (layout.shard - resident) * item_size(layout);
  const at::Tensor memory =
      locked_ ? locked_->take(resident, layout.dtype)
              : device::allocate_flat(ledger_, device::Role::parameters, resident, layout.dtype, at::kCPU);
  const Buffer host = resident == layout.shard ? Buffer::resident(memory)
                                               : tiers::file_buffer(memory, layout.shard, file_, staging_,
                                                                    "the parameters of unit '" + layout.name + "'");
  return reads_ ? tiers::copied_buffer(host, reads_) : host;
}

std::string OffloadedParameters::text() const {
  if (!uses_files()) return "in the host's memory (" + bytes_text(off_device_bytes()) + ", page-locked)";
  return tiers::split_text(bytes_in_memory_, bytes_in_files_, *file_, *staging_);
}

}  // namespace deeptide::zero
