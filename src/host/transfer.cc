// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies into and out of slots, as far as possible without waiting.
#include "host/transfer.h"

#include <algorithm>
#include <cstring>

#include "device/memory/memory_copy.h"

namespace deeptide::host {

using at::Tensor;
using std::chrono::milliseconds;

namespace {

// Two ranks' slots fit the second-level caches, so a piece is read from there, not from memory.
constexpr int64_t kSlotBytes = 256 << 10;
constexpr int kSlots = 4;
// A tensor with more bytes than this has left a core's caches by the time it is complete.
constexpr int64_t kPastCacheBytes = 4 << 20;

void check_in_cpu_memory(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu(), "deeptide: shared memory carries CPU tensors, got one on ", tensor.device(),
              "; give the world a c10d backend for that device, or set \"deeptide\": {\"shared_memory\": false}");
}

class HostOperation : public Operation {
 public:
  HostOperation(std::shared_ptr<Ring> ring, Transfer transfer, OperationPtr before)
      : ring_(std::move(ring)),
        transfer_(std::move(transfer)),
        before_(std::move(before)),
        slot_bytes_(ring_->slot_bytes()),
        num_pieces_((transfer_.bytes + slot_bytes_ - 1) / slot_bytes_) {}

  bool ready() override { return advance(milliseconds(0)); }

  bool advance(milliseconds limit) override {
    if (before_) {
      if (!before_->advance(limit)) return false;
      before_.reset();
    }
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (num_taken_ < num_pieces_) {
      send();
      const auto left = deadline - std::chrono::steady_clock::now();
      const auto patience = std::max(milliseconds(0), std::chrono::ceil<milliseconds>(left));
      // Own slots become free once all ranks have read them; that wait depends only on slots posted already.
      if (num_sent_ == num_taken_) {
        if (!ring_->wait_read(ring_->num_posted() - static_cast<uint32_t>(ring_->num_slots()), patience)) return false;
        continue;
      }
      const uint32_t number = first_ + static_cast<uint32_t>(num_taken_);
      if (!ring_->wait_posted(number, patience)) return false;
      take(number);
    }
    transfer_ = Transfer{};
    num_pieces_ = num_taken_ = 0;
    return true;
  }

 private:
  int64_t piece_bytes(int64_t piece) const { return std::min(slot_bytes_, transfer_.bytes - piece * slot_bytes_); }

  /// Fills the slots that are free.
  void send() {
    while (num_sent_ < num_pieces_) {
      char* slot = ring_->next_slot();
      if (slot == nullptr) return;
      if (transfer_.source) fill(slot, num_sent_ * slot_bytes_, piece_bytes(num_sent_));
      const uint32_t number = ring_->post();
      if (num_sent_++ == 0) first_ = number;
    }
  }

  void fill(char* slot, int64_t offset, int64_t bytes) const {
    const auto copy = [&](int64_t begin, int64_t end) {
      if (begin < end) std::memcpy(slot + begin - offset, transfer_.source + begin, end - begin);
    };
    const int64_t end = offset + bytes;
    copy(offset, std::min(end, std::max(offset, transfer_.own_begin)));
    copy(std::max(offset, std::min(end, transfer_.own_end)), end);
  }

  void take(uint32_t number) {
    Pieces pieces{num_taken_ * slot_bytes_, piece_bytes(num_taken_), {}};
    for (int peer = 0; peer < ring_->size(); ++peer) pieces.data.push_back(ring_->slot(peer, number));
    pieces.data[ring_->index()] = transfer_.source ? transfer_.source + pieces.offset : nullptr;
    transfer_.take(pieces);
    ring_->set_read(number);
    ++num_taken_;
  }

  std::shared_ptr<Ring> ring_;
  Transfer transfer_;
  OperationPtr before_;
  int64_t slot_bytes_;
  int64_t num_pieces_;
  int64_t num_sent_ = 0;
  int64_t num_taken_ = 0;
  uint32_t first_ = 0;
};

}  // namespace

Channel::Channel(std::shared_ptr<Host> host) : ring_(std::make_shared<Ring>(std::move(host), kSlots, kSlotBytes)) {}

OperationPtr Channel::start(Transfer transfer) {
  auto before = last_ && !last_->advance(milliseconds(0)) ? last_ : nullptr;
  last_ = std::make_shared<HostOperation>(ring_, std::move(transfer), before);
  last_->advance(milliseconds(0));
  return last_;
}

const char* readable(const Tensor& tensor) {
  check_in_cpu_memory(tensor);
  return static_cast<const char*>(tensor.const_data_ptr());
}

Destination::Destination(const Tensor& tensor) {
  check_in_cpu_memory(tensor);
  memory_ = static_cast<char*>(tensor.mutable_data_ptr());
  past_cache_ = static_cast<int64_t>(tensor.nbytes()) >= kPastCacheBytes;
}

void Destination::write(int64_t offset, const char* data, int64_t bytes) const {
  char* const to = memory_ + offset;
  if (to == data) return;
  if (past_cache_) return device::copy_past_cache(to, data, bytes);
  std::memcpy(to, data, bytes);
}

Transfer broadcast_transfer(const Tensor& tensor, int root, int index) {
  const bool sends = index == root;
  auto take = [to = Destination(tensor), root, sends](const Pieces& pieces) {
    if (!sends) to.write(pieces.offset, pieces.data[root], pieces.bytes);
  };
  return {{tensor}, sends ? readable(tensor) : nullptr, static_cast<int64_t>(tensor.nbytes()), take};
}

}  // namespace deeptide::host
