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

int64_t bytes_of(const std::vector<const sharding::UnitLayout*>& layouts) {
  int64_t bytes = 0;
  for (const sharding::UnitLayout* layout : layouts) bytes += layout->shard * item_size(*layout);
  return bytes;
}

/// Which shards leave the device, and how many bytes of these stay in the host's memory.
struct Leaving {
  std::vector<const sharding::UnitLayout*> layouts;
  int64_t allowed = 0;
};

/// A device takes whole shards: what it was allowed beyond them goes to files, if there are any.
Leaving leaving(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts) {
  Leaving off;
  const std::vector<bool> stays = stay_on_device(options, layouts);
  int64_t first = 0, left = options.max_in_memory;
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (stays[i]) continue;
    const int64_t counted = std::min(layouts[i]->shard, left);
    left -= counted;
    first += counted * item_size(*layouts[i]);
    off.layouts.push_back(layouts[i]);
  }
  const int64_t all = bytes_of(layouts), left_off = bytes_of(off.layouts);
  const int64_t on_device = options.on_device ? options.on_device->of(all) : 0;
  const int64_t allowed = std::max<int64_t>(0, first + options.memory.of(all) - on_device);
  off.allowed = options.folders.empty() ? left_off : std::min(left_off, allowed);
  return off;
}

/// Takes from `left` bytes the elements of a shard that stay in memory: all, or whole blocks.
int64_t take_resident(const sharding::UnitLayout& layout, int64_t& left) {
  int64_t resident = std::min(layout.shard, left / item_size(layout));
  if (resident < layout.shard) resident -= resident % tiers::swap_block_numel(layout.dtype);
  left -= resident * item_size(layout);
  return resident;
}

/// The bytes of each shard that stay in memory.
std::vector<int64_t> resident_bytes(const Leaving& off) {
  std::vector<int64_t> bytes;
  int64_t left = off.allowed;
  for (const sharding::UnitLayout* layout : off.layouts) {
    bytes.push_back(take_resident(*layout, left) * item_size(*layout));
  }
  return bytes;
}

}  // namespace

std::vector<bool> stay_on_device(const ParameterOffload& options,
                                 const std::vector<const sharding::UnitLayout*>& layouts) {
  std::vector<bool> stays(layouts.size(), false);
  int64_t left = options.on_device ? options.on_device->of(bytes_of(layouts)) : 0;
  for (size_t i = 0; options.on_device && i < layouts.size(); ++i) {
    left -= layouts[i]->shard * item_size(*layouts[i]);
    if (left < 0) break;
    stays[i] = true;
  }
  return stays;
}

ParameterForecast forecast(const ParameterOffload& options, const std::vector<const sharding::UnitLayout*>& layouts,
                           bool on_cpu) {
  ParameterForecast bytes;
  const Leaving off = leaving(options, layouts);
  bytes.device_bytes = bytes_of(layouts) - bytes_of(off.layouts);
  if (!options.folders.empty()) bytes.staging_bytes = num_slots(options, off.layouts) * tiers::kSwapBlockBytes;
  const std::vector<int64_t> resident = resident_bytes(off);
  for (size_t i = 0; i < off.layouts.size(); ++i) {
    bytes.memory_bytes += resident[i];
    bytes.file_bytes += off.layouts[i]->shard * item_size(*off.layouts[i]) - resident[i];
  }
  if (!on_cpu) bytes.memory_bytes = device::PageLocked::forecast(resident);
  return bytes;
}

OffloadedParameters::OffloadedParameters(const ParameterOffload& options,
                                         const std::vector<const sharding::UnitLayout*>& layouts,
                                         std::shared_ptr<device::Ledger> ledger, at::Device device)
    : stay_on_device_(zero::stay_on_device(options, layouts)), device_(device), ledger_(std::move(ledger)) {
  const Leaving off = leaving(options, layouts);
  left_in_memory_ = off.allowed;
  const auto role = device.is_cpu() ? device::Role::parameters : device::Role::host_parameters;
  const int slots = num_slots(options, off.layouts);
  if (!device.is_cpu()) {
    locked_ = std::make_unique<device::PageLocked>(ledger_, role, resident_bytes(off));
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
  if (stay_on_device_.at(next_++)) {
    bytes_on_device_ += layout.shard * item_size(layout);
    return Buffer::resident(
        device::allocate_flat(ledger_, device::Role::parameters, layout.shard, layout.dtype, device_));
  }
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
  const std::string beside =
      bytes_on_device_ > 0 ? bytes_text(bytes_on_device_) + " on " + device_.str() + ", " : std::string();
  if (!uses_files()) return beside + "in the host's memory (" + bytes_text(off_device_bytes()) + ", page-locked)";
  return beside + tiers::split_text(bytes_in_memory_, bytes_in_files_, *file_, *staging_);
}

}  // namespace deeptide::zero
