// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Narrows a block in one lane while another copies the block before it.
#include "zero/transfers/parameters_out.h"

#include <algorithm>

#include "tiers/swap_file.h"

namespace deeptide::zero {

using at::Tensor;
using device::Lane;
using tiers::Block;
using tiers::Buffer;

namespace {

/// The length of files' blocks: each is written whole.
constexpr int64_t kSlotBytes = tiers::kSwapBlockBytes;

int64_t narrowed_slot_bytes(int64_t narrowed_bytes) {
  const int64_t bytes = std::min(narrowed_bytes, kSlotBytes);
  return (bytes + device::kAlignmentBytes - 1) / device::kAlignmentBytes * device::kAlignmentBytes;
}

}  // namespace

int64_t ParametersOut::forecast(int64_t narrowed_bytes) { return 2 * narrowed_slot_bytes(narrowed_bytes); }

ParametersOut::ParametersOut(std::shared_ptr<device::Ledger> ledger, at::Device device, int64_t narrowed_bytes)
    : ledger_(std::move(ledger)), narrow_(Lane::create(device)), out_(Lane::create(device)) {
  const int64_t bytes = narrowed_slot_bytes(narrowed_bytes);
  if (bytes == 0) return;
  arena_ = device::allocate_flat(ledger_, device::Role::optimizer, forecast(narrowed_bytes), at::kByte, device);
  for (size_t i = 0; i < slots_.size(); ++i)
    slots_[i].memory = arena_.narrow(0, static_cast<int64_t>(i) * bytes, bytes);
  narrow_.wait_for(Lane::current(device).mark());
}

ParametersOut::~ParametersOut() {
  try {
    out_.mark().wait();
  } catch (const std::exception&) {  // a device that has failed copies no more
  }
}

void ParametersOut::send(const Tensor& master, const Buffer& shard, int64_t begin) {
  const device::Mark made = Lane::current(out_.device()).mark();
  narrow_.wait_for(made);
  out_.wait_for(made);
  is_under_way_ = true;
  const int64_t most = kSlotBytes / static_cast<int64_t>(c10::elementSize(shard.dtype()));
  const Buffer* const one[] = {&shard};
  const auto send_block = [&](Block block) {
    const Tensor values = master.narrow(0, block.begin - begin, block.count);
    if (values.scalar_type() == shard.dtype()) {
      const Lane::Scope on_lane(out_);
      return shard.copy_from(values, block.begin);
    }
    const Tensor parameters = narrowed(values, shard.dtype());
    const Lane::Scope on_lane(out_);
    shard.copy_from(parameters, block.begin);
    slots_[next_].free_after = out_.mark();
    next_ = (next_ + 1) % slots_.size();
  };
  for_each_block(std::span<const Buffer* const>(one), {begin, master.numel()}, send_block, most);
}

/// In the next slot.
Tensor ParametersOut::narrowed(const Tensor& values, at::ScalarType dtype) {
  const Slot& slot = slots_[next_];
  narrow_.wait_for(slot.free_after);
  const Lane::Scope on_lane(narrow_);
  const int64_t bytes = values.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  Tensor parameters = slot.memory.narrow(0, 0, bytes).view(dtype);
  parameters.copy_(values);
  out_.wait_for(narrow_.mark());
  return parameters;
}

void ParametersOut::join() {
  if (!std::exchange(is_under_way_, false)) return;
  Lane::current(out_.device()).wait_for(out_.mark());
}

}  // namespace deeptide::zero
