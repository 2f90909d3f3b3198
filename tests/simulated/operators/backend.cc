// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Registers allocators, streams, events and hooks.
#include "simulated/operators/backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <atomic>
#include <cstring>
#include <utility>

// A backend answers these from 2.10 on: free memory and capabilities.
#define DEEPTIDE_TORCH_ASKS_MORE (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10)

namespace deeptide::simulated {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local int stream_of_thread = 0;
std::atomic<int64_t> live_events = 0, address_questions = 0;

Machine& machine() { return Machine::instance(); }
Stream as_stream(int index) { return Stream(Stream::UNSAFE, simulated_device(), index); }
int index_of(const Stream& stream) { return static_cast<int>(stream.id()); }

void free_block(void* context) {
  const std::unique_ptr<BlockRef> block(static_cast<BlockRef*>(context));
  machine().release(std::move(*block));
}

void free_nothing(void*) {}

c10::DataPtr allocate(Kind kind, size_t bytes) {
  const Device where = kind == Kind::device ? simulated_device() : Device(c10::kCPU);
  if (bytes == 0) return {nullptr, nullptr, &free_nothing, where};
  auto block = with_torch_errors([&] { return machine().allocate(kind, bytes, current_stream()); });
  void* const shown = block->shown;
  return {shown, std::make_unique<BlockRef>(std::move(block)).release(), &free_block, where};
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return simulated::allocate(machine().pins_for_another() ? Kind::pinned_elsewhere : Kind::pinned, bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

class SimulatedAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return simulated::allocate(Kind::device, bytes); }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "simulated device: the host cannot copy device memory");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { machine().empty_cache(); }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (const auto block = machine().find(data.get())) machine().record_stream(block, index_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats all;
    const Stats stats = machine().stats();
    for (auto* kind : {&all.allocated_bytes, &all.active_bytes}) {
      (*kind)[0].current = static_cast<int64_t>(stats.used_bytes);
      (*kind)[0].peak = static_cast<int64_t>(stats.peak_bytes);
    }
    all.reserved_bytes[0].current = static_cast<int64_t>(stats.reserved_bytes);
    return all;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { machine().reset_peak(); }
#if DEEPTIDE_TORCH_ASKS_MORE
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    const Stats stats = machine().stats();
    return {stats.cap_bytes - stats.used_bytes, stats.cap_bytes};
  }
#endif
};

SimulatedAllocator simulated_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kSimulated, &simulated_allocator)

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSimulated; }
  Device exchangeDevice(Device) const override { return simulated_device(); }
  Device getDevice() const override { return simulated_device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
#if DEEPTIDE_TORCH_ASKS_MORE
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
#endif

  Stream getStream(Device) const override { return as_stream(stream_of_thread); }
  Stream getDefaultStream(Device) const override { return as_stream(0); }
  Stream getNewStream(Device, int) const override { return as_stream(machine().pool_stream()); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return as_stream(machine().pool_stream()); }
  Stream exchangeStream(Stream stream) const override {
    return as_stream(std::exchange(stream_of_thread, index_of(stream)));
  }
  bool queryStream(const Stream& stream) const override { return machine().query_stream(index_of(stream)); }
  void synchronizeStream(const Stream& stream) const override {
    with_torch_errors([&] { machine().synchronize_stream(index_of(stream)); });
  }
  void synchronizeDevice(DeviceIndex) const override {
    with_torch_errors([] { machine().synchronize(); });
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = std::make_unique<Event>().release();
      ++live_events;
    }
    machine().record(as_event(*event), index_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) machine().wait(as_event(event), index_of(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || machine().query(as_event(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) with_torch_errors([&] { machine().synchronize(as_event(event)); });
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    const std::unique_ptr<Event> owned(static_cast<Event*>(event));
    if (owned) --live_events;
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return (as_event(second).time_s - as_event(first).time_s) * 1000;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    simulated_allocator.recordStream(data, stream);
  }

 private:
  static Event& as_event(void* event) { return *static_cast<Event*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

bool is_ours(const void* address, Kind kind) {
  const auto block = machine().find(address);
  return block && block->kind == kind;
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_ours(address, Kind::pinned); }
  Device getDeviceFromPtr(void* address) const override {
    ++address_questions;
    TORCH_CHECK(is_ours(address, Kind::device), "not memory of the simulated device");
    return simulated_device();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

Hooks hooks;
const bool registered = [] {
  c10::register_privateuse1_backend("sim");  // before it has a name, torch does not take it for an accelerator
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

int current_stream() { return stream_of_thread; }
int64_t num_events() { return live_events; }
int64_t num_address_questions() { return address_questions; }

c10::Allocator& device_allocator() { return simulated_allocator; }

/// A generator of the CPU's kind, since CPU kernels draw from it.
const at::Generator& default_generator() {
  static const auto generator = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  return generator;
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && is_ours(tensor.storage().unsafeGetStorageImpl()->data(), Kind::pinned);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* const self = storage.unsafeGetStorageImpl();
  TORCH_CHECK(self->resizable(), "simulated device: this storage cannot be resized");
  const size_t kept = std::min(bytes, self->nbytes());
  c10::DataPtr fresh = device_allocator().allocate(bytes);
  if (kept > 0) {
    const auto from = machine().find(self->data()), to = machine().find(fresh.get());
    Task task{.name = "storage resize", .uses = {{from, 0, kept, false}, {to, 0, kept, true}}, .run = {}, .cost = {}};
    task.run = [from = from->real, to = to->real, kept] { std::memcpy(to, from, kept); };
    with_torch_errors([&] { machine().enqueue(current_stream(), std::move(task)); });
  }
  self->set_data_ptr_noswap(std::move(fresh));
  self->set_nbytes(bytes);
}

}  // namespace deeptide::simulated
