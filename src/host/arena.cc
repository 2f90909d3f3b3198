// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands out ranges of one shared mapping.
#include "host/arena.h"

#include <iterator>
#include <map>
#include <mutex>

#include "base/invariant.h"
#include "device/memory/pages.h"

namespace deeptide::host {

using at::Tensor;
using device::kLargePage;
using device::round_up;

/// First fit over free ranges; a returned range is joined with its neighbours.
class Arena::Heap {
 public:
  Heap(int64_t begin, int64_t bytes) : capacity_(bytes) { free_[begin] = bytes; }

  int64_t take(int64_t bytes) {
    const int64_t alignment = bytes >= kLargePage ? kLargePage : device::page_size();
    std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [begin, size] = *it;
      const int64_t first = round_up(begin, alignment);
      if (first + bytes > begin + size) continue;
      free_.erase(it);
      if (first > begin) free_[begin] = first - begin;
      if (first + bytes < begin + size) free_[first + bytes] = begin + size - first - bytes;
      return first;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "deeptide: gradients wait for other ranks in more than ", capacity_,
                     " bytes of shared memory: another rank is far behind this one");
  }

  void give_back(int64_t begin, int64_t bytes) {
    std::lock_guard lock(mutex_);
    auto next = free_.lower_bound(begin);
    if (next != free_.end() && begin + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == begin) {
        previous->second += bytes;
        return;
      }
    }
    free_[begin] = bytes;
  }

 private:
  int64_t capacity_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // begin, bytes
};

Arena::Arena(std::shared_ptr<device::SharedMemory> memory, int64_t heap_begin, int64_t heap_bytes)
    : memory_(std::move(memory)), heap_(std::make_unique<Heap>(heap_begin, heap_bytes)) {}

Arena::~Arena() = default;

std::shared_ptr<Arena> Arena::create(Host& host, int64_t parameter_bytes, int64_t heap_bytes, std::string& why_not) {
  const int64_t parameters = round_up(parameter_bytes, kLargePage);
  const int64_t heap = round_up(heap_bytes, kLargePage);
  auto memory = host.share(parameters + heap * host.size(), why_not, device::PrivateView::check);
  if (!memory) return nullptr;
  // Excludes the parameters: large pages made forward and backward 1 to 7 % slower (docs/measurements.md).
  memory->prefer_large_pages(parameters, heap * host.size());
  return std::shared_ptr<Arena>(new Arena(std::move(memory), parameters + heap * host.index(), heap));
}

int64_t Arena::heap_of_buckets(int64_t numel) {
  constexpr int64_t kBucketsOfModel = 16, kSpare = 64 << 20;
  return kBucketsOfModel * numel * static_cast<int64_t>(sizeof(float)) + kSpare;
}

int64_t Arena::padded(int64_t bytes) { return round_up(bytes, device::page_size()); }

Tensor Arena::allocate(const std::shared_ptr<device::Ledger>& ledger, device::Role role, int64_t bytes) {
  ledger->check_room(role, bytes);
  const int64_t taken = round_up(std::max<int64_t>(bytes, 1), device::page_size());
  const int64_t offset = heap_->take(taken);
  try {
    memory_->populate(offset, taken);
  } catch (...) {
    memory_->discard(offset, taken);
    heap_->give_back(offset, taken);
    throw;
  }
  ledger->add(role, bytes);
  return memory_->view(offset, bytes, at::kByte, [self = shared_from_this(), ledger, role, bytes, offset, taken] {
    ledger->add(role, -bytes);
    self->memory_->discard(offset, taken);
    self->heap_->give_back(offset, taken);
  });
}

int64_t Arena::offset_of(const Tensor& tensor) const {
  if (tensor.numel() == 0) return 0;  // its data pointer is null, wherever the tensor lies
  const int64_t offset = static_cast<const char*>(tensor.const_data_ptr()) - memory_->data();
  DEEPTIDE_INVARIANT(offset >= 0 && offset + static_cast<int64_t>(tensor.nbytes()) <= memory_->size(),
                     "not a buffer of the arena");
  return offset;
}

Tensor Arena::at(int64_t offset, int64_t numel, at::ScalarType dtype) const {
  return memory_->view(offset, numel, dtype);
}

}  // namespace deeptide::host
