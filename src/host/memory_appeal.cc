// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A line of two counters per rank: how often others asked it, and how often it has answered.
#include "host/memory_appeal.h"

#include <chrono>
#include <vector>

#include "base/resources.h"
#include "host/counter.h"

namespace deeptide::host {

using std::chrono::steady_clock;

namespace {

constexpr std::chrono::seconds kAnswer{1};  // a gigabyte takes the kernel a tenth of that; ended ranks never answer
constexpr std::chrono::hours kSleep{1};

}  // namespace

struct alignas(128) MemoryAppeal::Line {
  Counter asked, answered;
};

int64_t MemoryAppeal::bytes_for(int size) { return size * static_cast<int64_t>(sizeof(Line)); }

MemoryAppeal::MemoryAppeal(std::shared_ptr<device::SharedMemory> memory, char* lines, int size, int index)
    : memory_(std::move(memory)), own_(reinterpret_cast<Line*>(lines) + index) {
  thread_ = start_thread([this] { answer(); });
  Line* const first = reinterpret_cast<Line*>(lines);
  asking_ = std::make_unique<device::Asking>([kept = memory_, first, size, index] {
    std::vector<uint32_t> numbers(size);
    for (int i = 0; i < size; ++i) {
      if (i != index) numbers[i] = advance(first[i].asked);
    }
    const auto deadline = steady_clock::now() + kAnswer;
    bool answered = false;
    for (int i = 0; i < size; ++i) {
      if (i != index) answered = await(first[i].answered, numbers[i], deadline, Linger::none) || answered;
    }
    return answered;
  });
}

MemoryAppeal::~MemoryAppeal() {
  asking_.reset();
  stop_ = true;
  advance(own_->asked);
  if (thread_.joinable()) thread_.join();
}

void MemoryAppeal::answer() {
  uint32_t seen = 0;
  for (;;) {
    if (!await(own_->asked, seen + 1, steady_clock::now() + kSleep, Linger::none)) continue;
    seen = own_->asked.value.load(std::memory_order_seq_cst);
    if (stop_) return;
    device::release_idle_heap();
    publish(own_->answered, seen);
  }
}

}  // namespace deeptide::host
