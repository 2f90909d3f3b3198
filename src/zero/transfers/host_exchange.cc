// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two rings of page-locked blocks. The host waits for one block's copy, never for a lane.
#include "zero/transfers/host_exchange.h"

#include <algorithm>
#include <utility>

#include "base/invariant.h"
#include "device/memory/page_locked.h"

namespace deeptide::zero {

using at::Tensor;
using device::Lane;
using device::Mark;
using tiers::Block;

namespace {

constexpr int64_t kSlots = 4;  // in each direction: one in use, one that is copied, two that even out their times

int64_t slot_bytes(int64_t largest) {
  const int64_t bytes = std::min(largest, kHostBlockNumel) * static_cast<int64_t>(sizeof(float));
  return (bytes + device::kAlignmentBytes - 1) / device::kAlignmentBytes * device::kAlignmentBytes;
}

Tensor part_of(const Tensor& bytes, int64_t count, at::ScalarType dtype) {
  return bytes.narrow(0, 0, count * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

}  // namespace

int64_t HostExchange::forecast(int64_t largest, bool takes_gradients) {
  return (takes_gradients ? 2 : 1) * kSlots * slot_bytes(largest);
}

HostExchange::HostExchange(std::shared_ptr<device::Ledger> ledger, at::Device device, int64_t largest,
                           bool takes_gradients)
    : ledger_(std::move(ledger)), out_(Lane::create(device)), in_(Lane::create(device)), device_(device) {
  const int64_t bytes = forecast(largest, takes_gradients), slot = slot_bytes(largest);
  arena_ = device::allocate_page_locked(bytes, device);
  ledger_->add(device::Role::host_optimizer, bytes);
  for (int64_t i = 0; i < kSlots; ++i) {
    parameters_.push_back({arena_.narrow(0, i * slot, slot), {}});
    if (!takes_gradients) continue;
    gradients_.push_back(arena_.narrow(0, (kSlots + i) * slot, slot));
    idle_.push_back(i);
  }
}

HostExchange::~HostExchange() {
  try {
    out_.mark().wait();
    in_.mark().wait();
  } catch (const std::exception&) {  // a device that has failed writes no more
  }
  ledger_->add(device::Role::host_optimizer, -static_cast<int64_t>(arena_.nbytes()));
}

HostExchange::Step::Step(HostExchange& exchange) : exchange_(exchange) {
  exchange_.in_.wait_for(Lane::current(exchange_.device_).mark());
}

/// Drops work that remains after an error was announced and not asked for.
HostExchange::Step::~Step() {
  for (const Fetched& fetched : fetched_) exchange_.idle_.push_back(fetched.slot);
  try {
    join();
  } catch (const std::exception&) {  // a device that has failed gives no memory to anybody
  }
}

void HostExchange::Step::announce(int unit, Tensor gradient) {
  exchange_.out_.wait_for(Lane::current(exchange_.device_).mark());
  sources_.push_back({unit, std::move(gradient), 0});
  fetch_ahead();
}

void HostExchange::Step::fetch_ahead() {
  const Lane::Scope on_lane(exchange_.out_);
  while (!sources_.empty() && !exchange_.idle_.empty()) {
    Source& source = sources_.front();
    const int64_t begin = source.next * kHostBlockNumel;
    if (begin >= source.gradient.numel()) {
      sources_.pop_front();
      continue;
    }
    const int64_t count = std::min(kHostBlockNumel, source.gradient.numel() - begin);
    const int64_t slot = std::exchange(exchange_.idle_.back(), 0);
    exchange_.idle_.pop_back();
    Tensor values = part_of(exchange_.gradients_[slot], count, source.gradient.scalar_type());
    values.copy_(source.gradient.narrow(0, begin, count), /*non_blocking=*/true);
    fetched_.push_back({source.unit, source.next++, slot, std::move(values), exchange_.out_.mark()});
  }
}

/// Gives back what lies before the block, and leaves out what was announced before it.
void HostExchange::Step::pass_over(int unit, int64_t index) {
  const auto is_it = [&] { return fetched_.front().unit == unit && fetched_.front().index == index; };
  for (; !fetched_.empty() && !is_it(); fetched_.pop_front()) exchange_.idle_.push_back(fetched_.front().slot);
  if (!fetched_.empty()) return;
  while (!sources_.empty() && sources_.front().unit != unit) sources_.pop_front();
  if (!sources_.empty()) sources_.front().next = std::max(sources_.front().next, index);
}

Tensor HostExchange::Step::gradient(int unit, Block block) {
  const int64_t index = block.begin / kHostBlockNumel;
  pass_over(unit, index);
  fetch_ahead();
  DEEPTIDE_INVARIANT(!fetched_.empty() && fetched_.front().unit == unit && fetched_.front().index == index, "block ",
                     index, " of the gradient of unit ", unit, " was not announced, or has been passed");
  const Fetched& fetched = fetched_.front();
  fetched.arrived.wait();
  return fetched.values.narrow(0, block.begin - index * kHostBlockNumel, block.count);
}

Tensor HostExchange::Step::parameters(int64_t count, at::ScalarType dtype) {
  const Slot& slot = exchange_.parameters_[exchange_.next_];
  slot.free_after.wait();
  return part_of(slot.memory, count, dtype);
}

void HostExchange::Step::send(const Tensor& parameters, const Tensor& target) {
  const Lane::Scope on_lane(exchange_.in_);
  target.copy_(parameters, /*non_blocking=*/true);
  exchange_.parameters_[exchange_.next_].free_after = exchange_.in_.mark();
  exchange_.next_ = (exchange_.next_ + 1) % exchange_.parameters_.size();
}

void HostExchange::Step::join() const {
  const Lane current = Lane::current(exchange_.device_);
  current.wait_for(exchange_.out_.mark());
  current.wait_for(exchange_.in_.mark());
}

}  // namespace deeptide::zero
