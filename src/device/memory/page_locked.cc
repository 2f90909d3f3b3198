// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts buffers out of chunks, each a power of two.
#include "device/memory/page_locked.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <mutex>

#include "base/invariant.h"
#include "base/log.h"
#include "device/memory/idle_memory.h"

namespace deeptide::device {

using at::Tensor;

namespace {

constexpr int64_t kBufferAlignment = 4096;
constexpr int64_t kLargestPerChunk = 16;  // at least half as many fit

int64_t padded(int64_t bytes) { return (bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment; }

int64_t power_of_two(int64_t bytes, bool at_least) {
  const auto value = static_cast<uint64_t>(bytes);
  return static_cast<int64_t>(at_least ? std::bit_ceil(value) : std::bit_floor(value));
}

/// One chunk, and how many of the buffers lie in it, one after another.
struct Chunk {
  int64_t bytes = 0;
  size_t num_buffers = 0;
};

/// A chunk is no larger than what is left, so the last ones halve; or than one buffer needs.
std::vector<Chunk> chunks_for(const std::vector<int64_t>& sizes) {
  int64_t left = 0, largest = 0;
  for (const int64_t size : sizes) {
    left += padded(size);
    largest = std::max(largest, padded(size));
  }
  std::vector<Chunk> chunks;
  int64_t room = 0;
  for (const int64_t size : sizes) {
    const int64_t bytes = padded(size);
    if (chunks.empty() || bytes > room) {
      room = bytes == 0 ? 0 : power_of_two(std::min(left, kLargestPerChunk * largest), /*at_least=*/false);
      if (room < bytes) room = power_of_two(bytes, /*at_least=*/true);
      chunks.push_back({room, 0});
    }
    room -= bytes;
    left -= bytes;
    ++chunks.back().num_buffers;
  }
  return chunks;
}

/// Copies go on all the same, but none of them beside the host.
void tell_of_memory_for_another(at::Device device) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log(LogLevel::warning, "page-locked memory is not for " + device.str() +
                               ": torch takes it for another type of device, so copies make the host wait. Hide the " +
                               "other one, a GPU by CUDA_VISIBLE_DEVICES=, before torch is imported.");
  });
}

}  // namespace

Tensor allocate_page_locked(int64_t bytes, at::Device device) {
  auto& context = at::globalContext();
  auto* const allocator = bytes > 0 ? context.getPinnedMemoryAllocator(device.type()) : at::getCPUAllocator();
  Tensor memory;
  std::exception_ptr refused;
  const auto take = [&] {
    constexpr at::DispatchKeySet kCpu(at::DispatchKey::CPU);
    try {
      memory = at::detail::empty_generic({bytes}, allocator, kCpu, at::kByte, std::nullopt);
      return true;
    } catch (const std::exception&) {  // each device's has its own type
      refused = std::current_exception();
      return false;
    }
  };
  make_room(bytes);
  if (!take_before_idle(take)) std::rethrow_exception(refused);
  const bool is_for_it = bytes == 0 || context.isPinnedPtr(memory.const_data_ptr(), device.type());
  if (!is_for_it) tell_of_memory_for_another(device);
  return memory;
}

int64_t PageLocked::forecast(const std::vector<int64_t>& sizes) {
  int64_t bytes = 0;
  for (const Chunk& chunk : chunks_for(sizes)) bytes += chunk.bytes;
  return bytes;
}

PageLocked::PageLocked(std::shared_ptr<Ledger> ledger, Role role, at::Device device, const std::vector<int64_t>& sizes)
    : ledger_(std::move(ledger)), role_(role) {
  size_t next = 0;
  for (const Chunk& chunk : chunks_for(sizes)) {
    const Tensor memory = allocate_page_locked(chunk.bytes, device);
    int64_t begin = 0;
    for (size_t i = 0; i < chunk.num_buffers; ++i, ++next) {
      buffers_.push_back(memory.narrow(0, begin, sizes[next]));
      begin += padded(sizes[next]);
    }
    bytes_ += chunk.bytes;
  }
  ledger_->add(role_, bytes_);
}

PageLocked::~PageLocked() { ledger_->add(role_, -bytes_); }

Tensor PageLocked::take(int64_t numel, at::ScalarType dtype) {
  DEEPTIDE_INVARIANT(next_ < buffers_.size(), "more page-locked buffers are taken than were announced");
  const Tensor bytes = buffers_[next_++];
  DEEPTIDE_INVARIANT(bytes.numel() == numel * static_cast<int64_t>(c10::elementSize(dtype)), "a page-locked buffer of ",
                     bytes.numel(), " bytes is taken for ", numel, " elements");
  return bytes.view(dtype);
}

}  // namespace deeptide::device
