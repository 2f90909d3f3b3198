// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Points storages into flat buffers.
#include "sharding/unit.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include "device/torch_versions.h"
#include "numerics/kernels/copies.h"

namespace deeptide::sharding {

using at::DataPtr;
using at::Tensor;
using c10::StorageImpl;

namespace {

/// Keeps a flat buffer alive for as long as a storage points into it.
DataPtr pointer_into(const Tensor& flat, int64_t offset_bytes) {
  auto* owner = new Tensor(flat);
  void* data = static_cast<char*>(flat.mutable_data_ptr()) + offset_bytes;
  return DataPtr(
      data, owner, [](void* context) { delete static_cast<Tensor*>(context); }, flat.device());
}

std::string absent_text(const Parameter& p, bool engine_gone) {
  const std::string subject = "deeptide: the data of parameter '" + p.name + "' was accessed directly ";
  if (engine_gone) {
    return subject +
           "after its engine was destroyed, and only this rank's shard of it was ever here. Save it earlier: "
           "engine.module_state_dict() or engine.save_checkpoint(dir).";
  }
  return subject +
         "while it is sharded (ZeRO stage 3): data_ptr(), numpy(), torch.save and the like bypass the operators that "
         "gather it. Use engine.module_state_dict() or engine.save_checkpoint(dir), or take a copy with "
         "parameter.clone(), which every operator supports.";
}

void point_at_nothing(const Parameter& p, bool engine_gone) {
  StorageImpl& storage = *p.storage;
  storage.set_data_ptr_noswap(DataPtr(nullptr, storage._mutable_data_ptr_no_checks().device()));
  if (p.numel == 0) return;  // it lacks nothing
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(absent_text(p, engine_gone));
}

std::string hidden_text(const Parameter& p) {
  return "deeptide: the data of parameter '" + p.name +
         "' was accessed directly while the last step's values are on their way (\"deeptide\": {\"overlap_publish\": "
         "true}), by code that bypasses the operators that wait for them. Call parameter.detach() before, which waits "
         "as every operator does, or deeptide::zero::wait_for_values(parameter), or set overlap_publish to false.";
}

/// Storages of all living units; prevents a model from having two engines.
class Bound {
 public:
  // Never destroyed: engines may outlive static destruction.
  static Bound& instance() {
    static auto* bound = new Bound;
    return *bound;
  }
  void add(const StorageImpl* storage) {
    std::lock_guard lock(mutex_);
    storages_.insert(storage);
  }
  void remove(const StorageImpl* storage) {
    std::lock_guard lock(mutex_);
    storages_.erase(storage);
  }
  bool contains(const StorageImpl* storage) {
    std::lock_guard lock(mutex_);
    return storages_.count(storage) > 0;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const StorageImpl*> storages_;
};

}  // namespace

bool is_bound(const c10::Storage& storage) { return Bound::instance().contains(storage.unsafeGetStorageImpl()); }

Order Parameter::order_of(int tensor) const {
  const Tensor& t = tensors.at(tensor);
  return sizes.empty() ? Order{t.sizes(), t.strides()} : Order{sizes[tensor], strides[tensor]};
}

Tensor Parameter::view_of(const Tensor& flat, int tensor) const {
  const Order order = order_of(tensor);
  return at::as_strided(flat, order.sizes, order.strides, flat.storage_offset() + offset);
}

uint32_t Parameter::current_version() const {
  uint32_t total = 0;
  for (const Tensor& tensor : tensors) {
    if (!tensor.is_inference()) total += static_cast<uint32_t>(tensor._version());
  }
  return total;
}

Unit::Unit(int index, UnitLayout layout, std::vector<Parameter> parameters, UnitPlacement placement)
    : index_(index), layout_(std::move(layout)), parameters_(std::move(parameters)), placement_(std::move(placement)) {
  for (Parameter& p : parameters_) p.unit = this;
}

Unit::~Unit() {
  for (const Parameter& p : parameters_) Bound::instance().remove(p.storage.get());
  if (memory() != UnitMemory::sharded) return;
  for (Parameter& p : parameters_) {
    if (!p.storage) continue;
    for (const Tensor& t : p.tensors) set_gate_key(t, false);
    point_at_nothing(p, /*engine_gone=*/true);
  }
}

void Unit::pack(Tensor whole) const {
  whole.zero_();
  std::vector<Tensor> from, to;
  for (const Parameter& p : parameters_) {
    from.push_back(p.tensors.front().detach());
    to.push_back(p.view_of(whole));
  }
  numerics::copy_all(from, to);
}

void Unit::point_into(const Tensor& whole) {
  const auto item = static_cast<int64_t>(c10::elementSize(layout_.dtype));
  for (Parameter& p : parameters_) {
    p.storage = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), static_cast<size_t>(p.numel * item),
                                                 pointer_into(whole, p.offset * item), nullptr, false);
    Bound::instance().add(p.storage.get());
    p.sizes.clear();
    p.strides.clear();
    for (const Tensor& t : p.tensors) {
      p.sizes.push_back(t.sizes().vec());
      p.strides.push_back(t.strides().vec());
      auto* impl = t.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(c10::Storage(p.storage));
      impl->set_storage_offset(0);
      if (memory() == UnitMemory::sharded) set_gate_key(t, true);
    }
    p.version = p.current_version();
  }
}

void Unit::adopt_shared(Tensor shard, std::shared_ptr<device::PrivateView> view) {
  view_ = std::move(view);
  whole_ = view_->tensor(0, numel(), layout_.dtype);
  shard_ = tiers::Buffer::resident(std::move(shard));
  point_into(whole_);
}

bool Unit::has_private_writes() const {
  return view_ && view_->any_written([](int64_t, int64_t) { return true; });
}

void Unit::note_external_writes() {
  if (memory() != UnitMemory::whole) return;  // elsewhere private pages or the gate report them
  for (Parameter& p : parameters_) {
    const auto version = p.current_version();
    p.rewritten = p.rewritten || version != p.version;
    p.version = version;
  }
}

void Unit::forget_external_writes() {
  for (Parameter& p : parameters_) p.rewritten = false;
}

void Unit::count_write(Parameter& p) {
  for (const Tensor& t : p.tensors) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
  p.version = p.current_version();
}

const Parameter* Unit::moved(bool but_resized) const {
  const auto item = static_cast<int64_t>(c10::elementSize(layout_.dtype));
  // A sharded one has an address only while it is open.
  const bool stays = memory() != UnitMemory::sharded && !is_hidden();
  const char* begin = stays ? static_cast<const char*>(whole_.const_data_ptr()) : nullptr;
  for (const Parameter& p : parameters_) {
    if (but_resized && p.is_resized()) continue;
    for (const Tensor& t : p.tensors) {
      if (t.storage().unsafeGetStorageImpl() != p.storage.get()) return &p;
    }
    // share_memory() leaves the storage and replaces what it points to.
    if (stays && p.storage->data() != begin + p.offset * item) return &p;
  }
  return nullptr;
}

int64_t Unit::resident_bytes() const {
  if (memory() != UnitMemory::whole) return shard_.resident_bytes();
  return layout_.numel * static_cast<int64_t>(c10::elementSize(layout_.dtype));
}

void Unit::take_private_writes() {
  if (memory() != UnitMemory::shared) return;
  const auto item = static_cast<int64_t>(c10::elementSize(layout_.dtype));
  const auto* seen = static_cast<const char*>(whole_.const_data_ptr());
  auto* shard = static_cast<char*>(shard_.in_place().mutable_data_ptr());
  const int64_t shard_at = shard_begin() * item;
  // A written page also holds bytes that were not written: only bytes that differ are the program's.
  view_->any_written([&](int64_t begin, int64_t end) {
    for (Parameter& p : parameters_) {
      const auto [first, last] = owned_range(p);
      const int64_t from = std::max(begin, first * item), to = std::min(end, last * item);
      if (from >= to || std::memcmp(seen + from, shard + from - shard_at, to - from) == 0) continue;
      std::memcpy(shard + from - shard_at, seen + from, to - from);
      p.rewritten = true;
    }
    return false;
  });
  view_->forget();
}

void Unit::adopt(Tensor whole, const std::shared_ptr<device::Ledger>& ledger, const ShardPlacement& place) {
  point_into(whole);
  Tensor slice = whole.narrow(0, shard_begin(), layout_.shard);
  if (memory() == UnitMemory::whole) {
    whole_ = whole;
    shard_ = tiers::Buffer::resident(slice);
    return;
  }
  shard_ = place ? place(layout_)
                 : tiers::Buffer::resident(device::allocate_flat(ledger, device::Role::parameters, layout_.shard,
                                                                 layout_.dtype, whole.device()));
  shard_.copy_from(slice);
  shard_.write_behind();
  for (Parameter& p : parameters_) point_at_nothing(p, /*engine_gone=*/false);
}

void Unit::open(Parameter& p) {
  ++pins_;
  if (p.pins++ > 0) return;
  device::allow_data_access(*p.storage);
  char* data = static_cast<char*>(whole_.mutable_data_ptr()) + p.offset * static_cast<int64_t>(whole_.element_size());
  p.storage->set_data_ptr_noswap(DataPtr(data, whole_.device()));
}

void Unit::close(Parameter& p) {
  --pins_;
  if (--p.pins == 0) point_at_nothing(p, /*engine_gone=*/false);
}

void Unit::hide() {
  for (const Parameter& p : parameters_) {
    p.storage->release_data_and_set_meta_custom_data_ptr_error_msg_(hidden_text(p));
  }
  hidden_.store(true, std::memory_order_release);
}

void Unit::show() {
  for (const Parameter& p : parameters_) device::allow_data_access(*p.storage);
  hidden_.store(false, std::memory_order_release);
}

std::pair<int64_t, int64_t> Unit::owned_range(const Parameter& p) const {
  const int64_t first = std::max(p.offset, shard_begin());
  const int64_t last = std::min(p.offset + p.numel, shard_begin() + layout_.shard);
  return {first, std::max(first, last)};
}

Tensor Unit::shard_for(const Tensor& whole) const {
  Tensor shard = shard_.in_place();
  if (shard.defined()) return shard;
  shard = whole.narrow(0, shard_begin(), layout_.shard);
  shard_.copy_to(shard);
  return shard;
}

void Unit::write_back(Parameter& p, const Tensor& kept) {
  const auto [first, last] = owned_range(p);
  p.rewritten = true;
  if (first == last) return;
  const Tensor slice = kept.defined() ? kept : whole_.narrow(0, shard_begin(), layout_.shard);
  const int64_t begin = first - shard_begin();
  shard_.copy_from(slice.narrow(0, begin, last - first), begin);
}

std::vector<const UnitLayout*> layouts_of(const std::vector<Unit*>& units) {
  std::vector<const UnitLayout*> layouts;
  for (const Unit* unit : units) {
    if (unit != nullptr) layouts.push_back(&unit->layout());
  }
  return layouts;
}

}  // namespace deeptide::sharding
