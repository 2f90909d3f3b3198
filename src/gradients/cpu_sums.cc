// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One sum fills a buffer of the device while the one before it leaves the other.
#include "gradients/cpu_sums.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/invariant.h"

namespace deeptide::gradients {

using at::Tensor;
using device::Lane;
using device::Mark;
using device::Role;

namespace {

constexpr size_t kRing = 2;  // buffers of the device: one that changes, one that leaves

/// Bytes that leave, in the order of units.
std::vector<int64_t> leaving_bytes(const std::vector<CpuSums::Cut>& cuts, at::ScalarType dtype) {
  std::vector<int64_t> sizes;
  for (const CpuSums::Cut& cut : cuts) {
    if (cut.stays < cut.numel) {
      sizes.push_back((cut.numel - cut.stays) * static_cast<int64_t>(c10::elementSize(dtype)));
    }
  }
  return sizes;
}

/// Elements of the ring's buffers: the largest sum fits one, and any two the both.
std::vector<int64_t> ring_of(const std::vector<CpuSums::Cut>& cuts) {
  std::vector<int64_t> sizes;
  for (const CpuSums::Cut& cut : cuts) {
    if (cut.stays < cut.numel) sizes.push_back(cut.numel);
  }
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  sizes.resize(std::min(sizes.size(), kRing));
  return sizes;
}

}  // namespace

CpuSums::Forecast CpuSums::forecast(const std::vector<Cut>& cuts, at::ScalarType dtype) {
  int64_t numel = 0;
  for (const int64_t size : ring_of(cuts)) numel += size;
  for (const Cut& cut : cuts) numel += cut.stays < cut.numel ? cut.stays : 0;
  return {.on_device = numel * static_cast<int64_t>(c10::elementSize(dtype)),
          .on_host = device::PageLocked::forecast(leaving_bytes(cuts, dtype))};
}

CpuSums::CpuSums(std::shared_ptr<device::Ledger> ledger, at::Device device, std::vector<Cut> cuts, at::ScalarType dtype)
    : ledger_(std::move(ledger)),
      device_(device),
      cuts_(std::move(cuts)),
      dtype_(dtype),
      home_(Lane::current(device)),
      out_(Lane::create(device)),
      in_(Lane::create(device)),
      locked_(std::in_place, ledger_, Role::host_gradients, device, leaving_bytes(cuts_, dtype)),
      on_host_(cuts_.size()),
      stays_(cuts_.size()) {
  for (size_t unit = 0; unit < cuts_.size(); ++unit) {
    const Cut& cut = cuts_[unit];
    if (cut.stays == cut.numel) continue;
    on_host_[unit] = std::make_shared<CpuPart>();
    on_host_[unit]->values = locked_->take(cut.numel - cut.stays, dtype);
    stays_[unit] = allocate(cut.stays);
  }
  for (const int64_t numel : ring_of(cuts_)) {
    ring_.push_back({.numel = numel, .memory = allocate(numel), .free_after = home_.mark()});
  }
}

/// The host waits for nothing: behind a collective whose peer has failed, copies may never run. Allocators of
/// page-locked memory know the lanes that copy, and reuse none before.
CpuSums::~CpuSums() {
  try {
    order_before_frees();
  } catch (const std::exception&) {  // a device that has failed gives no memory to anybody
  }
}

/// Memory may next be used by any lane: what this one's lanes, and the current one, have issued precedes that.
void CpuSums::order_before_frees() {
  const Lane current = Lane::current(device_);
  home_.wait_for(current.mark());
  home_.wait_for(out_.mark());
  home_.wait_for(in_.mark());
  current.wait_for(home_.mark());
}

Tensor CpuSums::allocate(int64_t numel) const {
  if (numel == 0) return at::empty({0}, at::TensorOptions().dtype(dtype_).device(device_));
  const Lane::Scope on_lane(home_);
  return device::allocate_flat(ledger_, Role::gradients, numel, dtype_, device_);
}

void CpuSums::release_memory() {
  order_before_frees();
  for (Tensor& stays : stays_) stays = Tensor();
  for (Slot& slot : ring_) slot.memory = Tensor();
}

/// The one of those with room for the sum that has been left alone longest.
CpuSums::Slot& CpuSums::take_slot(int64_t numel) {
  Slot* found = nullptr;
  for (Slot& slot : ring_) {
    if (slot.numel >= numel && (found == nullptr || slot.last_use < found->last_use)) found = &slot;
  }
  DEEPTIDE_INVARIANT(found != nullptr, "no buffer has room for a sum of ", numel, " elements");
  found->last_use = ++uses_;
  if (found->lent_to) found->free_after = std::exchange(found->lent_to, std::nullopt)->mark();
  if (!found->memory.defined()) {
    found->memory = allocate(found->numel);
    found->free_after = home_.mark();
  }
  return *found;
}

void CpuSums::change(int unit, bool first, const std::function<void(const Tensor& sum)>& change) {
  const Lane current = Lane::current(device_);
  if (!stays_[unit].defined()) {
    stays_[unit] = allocate(cuts_[unit].stays);
    current.wait_for(home_.mark());
  }
  Slot& slot = take_slot(cuts_[unit].numel);
  current.wait_for(slot.free_after);
  if (!first) bring(unit, slot);
  change(slot.memory.narrow(0, 0, cuts_[unit].numel));
  leave(unit, slot);
  slot.free_after = out_.mark();
}

Tensor CpuSums::lend(int unit) {
  const Lane current = Lane::current(device_);
  Slot& slot = take_slot(cuts_[unit].numel);
  current.wait_for(slot.free_after);
  bring(unit, slot);
  slot.lent_to = current;
  return slot.memory.narrow(0, 0, cuts_[unit].numel);
}

/// The sum as it is, into the slot: the current lane's next work finds it there.
void CpuSums::bring(int unit, const Slot& slot) {
  const Cut& cut = cuts_[unit];
  if (cut.stays > 0) slot.memory.narrow(0, 0, cut.stays).copy_(stays_[unit]);
  in_.wait_for(slot.free_after);
  if (!on_host_[unit]->arrived.empty()) in_.wait_for(on_host_[unit]->arrived.back());
  {
    const Lane::Scope on_lane(in_);
    slot.memory.narrow(0, cut.stays, cut.numel - cut.stays).copy_(on_host_[unit]->values, /*non_blocking=*/true);
  }
  Lane::current(device_).wait_for(in_.mark());
}

/// Block by block, since the host steps a block as soon as it is there.
void CpuSums::leave(int unit, const Slot& slot) {
  const Cut& cut = cuts_[unit];
  CpuPart& host = *on_host_[unit];
  if (cut.stays > 0) stays_[unit].copy_(slot.memory.narrow(0, 0, cut.stays));
  out_.wait_for(Lane::current(device_).mark());
  host.arrived.clear();
  const Lane::Scope on_lane(out_);
  for (int64_t begin = 0; begin < host.values.numel(); begin += CpuPart::kBlock) {
    const int64_t count = std::min(CpuPart::kBlock, host.values.numel() - begin);
    host.values.narrow(0, begin, count).copy_(slot.memory.narrow(0, cut.stays + begin, count), /*non_blocking=*/true);
    host.arrived.push_back(out_.mark());
  }
}

UnitGradient CpuSums::gradient(int unit) {
  if (!stays_[unit].defined()) stays_[unit] = allocate(cuts_[unit].stays);
  if (on_host_[unit]->arrived.empty()) on_host_[unit]->values.zero_();  // nothing has ever left
  return {stays_[unit], on_host_[unit]};
}

}  // namespace deeptide::gradients
