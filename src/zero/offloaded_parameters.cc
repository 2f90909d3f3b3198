// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sizes the memory that shards pass through, and reserves their files.
#include "zero/offloaded_parameters.h"

#include <algorithm>

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

}  // namespace

ParameterForecast forecast(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts) {
  ParameterForecast bytes;
  bytes.staging_bytes = num_slots(options, layouts) * tiers::kSwapBlockBytes;
  int64_t left = bytes_allowed(options, layouts);
  for (const sharding::UnitLayout* layout : layouts) {
    const int64_t resident = take_resident(*layout, left);
    bytes.memory_bytes += resident * item_size(*layout);
    bytes.file_bytes += (layout->shard - resident) * item_size(*layout);
  }
  return bytes;
}

OffloadedParameters::OffloadedParameters(const ParameterOffload& options,
                                         const std::vector<const sharding::UnitLayout*>& layouts,
                                         std::shared_ptr<device::Ledger> ledger)
    : left_in_memory_(bytes_allowed(options, layouts)),
      ledger_(std::move(ledger)),
      file_(std::make_shared<tiers::SwapFile>(options.folders)) {
  const int slots = num_slots(options, layouts);
  constexpr int kMostInFlight = 64;
  staging_ = std::make_shared<tiers::Staging>(io::make_queue(std::min(slots, kMostInFlight)), slots, ledger_,
                                              device::Role::parameters);
}

Buffer OffloadedParameters::place(const sharding::UnitLayout& layout) {
  const int64_t resident = take_resident(layout, left_in_memory_);
  bytes_in_memory_ += resident * item_size(layout);
  bytes_in_files_ += (layout.shard - resident) * item_size(layout);
  const auto memory = device::allocate_flat(ledger_, device::Role::parameters, resident, layout.dtype, at::kCPU);
  if (resident == layout.shard) return Buffer::resident(memory);
  return tiers::file_buffer(memory, layout.shard, file_, staging_, "the parameters of unit '" + layout.name + "'");
}

std::string OffloadedParameters::text() const {
  return tiers::split_text(bytes_in_memory_, bytes_in_files_, *file_, *staging_);
}

}  // namespace deeptide::zero
