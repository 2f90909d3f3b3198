// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sizes the memory that shards lie in or pass through, and reserves their files.
#include "zero/states/offloaded_parameters.h"

#include <algorithm>

#include "base/text.h"
#include "io/queue.h"
#include "tiers/file_store.h"

namespace deeptide::zero {

using tiers::Buffer;
using Layouts = std::vector<const sharding::UnitLayout*>;

namespace {

int64_t item_size(const sharding::UnitLayout& layout) { return static_cast<int64_t>(c10::elementSize(layout.dtype)); }

/// One block to be read or written while another is in use, at least.
int num_slots(const ParameterOffload& options, const Layouts& layouts) {
  constexpr int64_t kFewest = 2;
  int64_t blocks = 0;
  for (const sharding::UnitLayout* layout : layouts) {
    const int64_t bytes = std::min(layout->shard, options.buffer_numel) * item_size(*layout);
    blocks = std::max(blocks, (bytes + tiers::kSwapBlockBytes - 1) / tiers::kSwapBlockBytes);
  }
  return static_cast<int>(std::max(kFewest, options.num_buffers * blocks));
}

int64_t bytes_of(const Layouts& layouts) {
  int64_t bytes = 0;
  for (const sharding::UnitLayout* layout : layouts) bytes += layout->shard * item_size(*layout);
  return bytes;
}

/// A device takes whole shards, the first ones.
std::vector<bool> stay_on_device(const ParameterOffload& options, const Layouts& layouts) {
  std::vector<bool> stays(layouts.size(), false);
  int64_t left = options.on_device ? options.on_device->of(bytes_of(layouts)) : 0;
  for (size_t i = 0; options.on_device && i < layouts.size(); ++i) {
    left -= layouts[i]->shard * item_size(*layouts[i]);
    if (left < 0) break;
    stays[i] = true;
  }
  return stays;
}

/// Sends a device's allowance beyond whole shards to files, if there are any. Returns the bytes of shards off the
/// device that may stay in memory.
int64_t allowed_in_memory(const ParameterOffload& options, const Layouts& layouts, const std::vector<bool>& stays) {
  if (options.folders.empty()) return INT64_MAX;
  int64_t first = 0, left = options.max_in_memory;
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (stays[i]) continue;
    const int64_t counted = std::min(layouts[i]->shard, left);
    left -= counted;
    first += counted * item_size(*layouts[i]);
  }
  const int64_t all = bytes_of(layouts), on_device = options.on_device ? options.on_device->of(all) : 0;
  return std::max<int64_t>(0, first + options.memory.of(all) - on_device);
}

Layouts leaving(const Layouts& layouts, const std::vector<ShardPlace>& places) {
  Layouts off;
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (!places[i].on_device) off.push_back(layouts[i]);
  }
  return off;
}

/// The bytes of each leaving shard that stay in memory.
std::vector<int64_t> resident_bytes(const Layouts& layouts, const std::vector<ShardPlace>& places) {
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (!places[i].on_device) bytes.push_back(places[i].resident * item_size(*layouts[i]));
  }
  return bytes;
}

}  // namespace

std::vector<ShardPlace> place_shards(const ParameterOffload& options, const Layouts& layouts) {
  const std::vector<bool> stays = stay_on_device(options, layouts);
  int64_t left = allowed_in_memory(options, layouts, stays);
  std::vector<ShardPlace> places;
  for (size_t i = 0; i < layouts.size(); ++i) {
    ShardPlace& place = places.emplace_back(ShardPlace{.on_device = stays[i]});
    if (stays[i]) continue;
    const sharding::UnitLayout& layout = *layouts[i];
    place.resident = std::min(layout.shard, left / item_size(layout));
    if (place.resident < layout.shard) place.resident -= place.resident % tiers::swap_block_numel(layout.dtype);
    left -= place.resident * item_size(layout);
  }
  return places;
}

ParameterForecast forecast(const ParameterOffload& options, const Layouts& layouts,
                           const std::vector<ShardPlace>& places, bool on_cpu) {
  ParameterForecast bytes;
  const Layouts off = leaving(layouts, places);
  bytes.device_bytes = bytes_of(layouts) - bytes_of(off);
  if (!options.folders.empty()) bytes.staging_bytes = num_slots(options, off) * tiers::kSwapBlockBytes;
  const std::vector<int64_t> resident = resident_bytes(layouts, places);
  for (const int64_t each : resident) bytes.memory_bytes += each;
  bytes.file_bytes = bytes_of(off) - bytes.memory_bytes;
  if (!on_cpu) bytes.memory_bytes = device::PageLocked::forecast(resident);
  return bytes;
}

OffloadedParameters::OffloadedParameters(const ParameterOffload& options, const Layouts& layouts,
                                         const std::vector<ShardPlace>& places, std::shared_ptr<device::Ledger> ledger,
                                         at::Device device)
    : device_(device), ledger_(std::move(ledger)) {
  const auto role = device.is_cpu() ? device::Role::parameters : device::Role::host_parameters;
  const int slots = num_slots(options, leaving(layouts, places));
  if (!device.is_cpu()) {
    locked_ = std::make_unique<device::PageLocked>(ledger_, role, device, resident_bytes(layouts, places));
    // One block stays free for whoever leases one.
    reads_ = std::make_shared<tiers::ReadsUnderWay>(options.folders.empty() ? INT64_MAX : slots - 1);
  }
  if (options.folders.empty()) return;
  file_ = std::make_shared<tiers::SwapFile>(options.folders);
  constexpr int kMostInFlight = 64;
  staging_ =
      std::make_shared<tiers::Staging>(io::make_queue(std::min(slots, kMostInFlight)), slots, ledger_, role, device);
}

Buffer OffloadedParameters::place(const sharding::UnitLayout& layout, const ShardPlace& place) {
  if (place.on_device) {
    bytes_on_device_ += layout.shard * item_size(layout);
    return Buffer::resident(
        device::allocate_flat(ledger_, device::Role::parameters, layout.shard, layout.dtype, device_));
  }
  const int64_t resident = place.resident;
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
