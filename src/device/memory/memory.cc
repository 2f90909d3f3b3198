// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps flat memory, and keeps its ledger and its pools.
#include "device/memory/memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "device/memory/idle_memory.h"
#include "device/memory/pages.h"

namespace deeptide::device {

using at::ScalarType;
using at::Tensor;

namespace {

constexpr int64_t kLargeRequest = 256 << 10;  // below it, a separate buffer costs nothing

struct Mapping {
  char* start = nullptr;
  int64_t length = 0;
};

/// Maps anonymous zero pages; from 2 MiB on aligned so that the kernel can use large pages. The tail stays in plain
/// pages: a large page for it would waste up to 2 MiB in each of many buffers.
Mapping map_pages(const Ledger& ledger, Role role, int64_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, bytes < kMostBytes, "deeptide: cannot map ", bytes, " bytes for ", role_name(role),
                   ": more than a process can address");
  Mapping mapping;
  mapping.length = round_up(std::max<int64_t>(bytes, 1), kPage);
  const int64_t large = mapping.length / kLargePage * kLargePage;
  const int64_t slack = large > 0 ? kLargePage : 0;
  make_room(mapping.length);
  void* base = MAP_FAILED;
  int error = 0;
  const bool taken = take_before_idle([&] {
    base = ::mmap(nullptr, mapping.length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    error = errno;
    return base != MAP_FAILED;
  });
  TORCH_CHECK_WITH(OutOfMemoryError, taken, "deeptide: cannot map ", bytes, " bytes for ", role_name(role), ": ",
                   std::strerror(error), ". ", ledger.text());
  mapping.start = static_cast<char*>(base);
  if (large == 0) return mapping;
  const int64_t before = round_up(reinterpret_cast<int64_t>(base), kLargePage) - reinterpret_cast<int64_t>(base);
  mapping.start += before;
  if (before > 0) ::munmap(base, before);
  if (slack > before) ::munmap(mapping.start + mapping.length, slack - before);
  ::madvise(mapping.start, large, MADV_HUGEPAGE);  // a request: plain pages serve as well
  if (mapping.length > large) ::madvise(mapping.start + large, mapping.length - large, MADV_NOHUGEPAGE);
  return mapping;
}

/// Returns zeros of torch's allocator. Errors: OutOfMemoryError, which also says for what.
Tensor allocate_on_device(const Ledger& ledger, Role role, int64_t numel, const at::TensorOptions& options) {
  try {
    return at::zeros({numel}, options);
  } catch (const c10::OutOfMemoryError& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "deeptide: cannot allocate ",
                     numel * static_cast<int64_t>(options.dtype().itemsize()), " bytes for ", role_name(role), " on ",
                     options.device(), ". ", ledger.text(), " ", error.what_without_backtrace());
  }
}

int64_t bytes_of(int64_t numel, ScalarType dtype) { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }

/// Returns the smallest buffer that serves a request. `size_if_fit`: a buffer's bytes, or -1 if it does not serve it.
template <typename Buffers, typename SizeIfFit>
typename Buffers::iterator least_waste(Buffers& buffers, const SizeIfFit& size_if_fit) {
  auto chosen = buffers.end();
  for (auto it = buffers.begin(); it != buffers.end(); ++it) {
    if (size_if_fit(*it) < 0) continue;
    if (chosen == buffers.end() || size_if_fit(*it) < size_if_fit(*chosen)) chosen = it;
  }
  return chosen;
}

}  // namespace

const char* role_name(Role role) {
  static constexpr const char* kNames[] = {"parameters",
                                           "gradients",
                                           "optimizer states",
                                           "gathered",
                                           "communication",
                                           "gradients while ranks are late",
                                           "communication while ranks are late",
                                           "activations",
                                           "optimizer states in the host's memory",
                                           "parameters in the host's memory",
                                           "gradients in the host's memory",
                                           "activations in the host's memory"};
  return kNames[static_cast<int>(role)];
}

Role beyond_reserve(Role role) {
  if (role == Role::gradients) return Role::late_gradients;
  return role == Role::communication ? Role::late_communication : role;
}

void Ledger::add(Role role, int64_t bytes) {
  std::lock_guard lock(mutex_);
  const int i = static_cast<int>(role);
  current_[i] += bytes;
  peak_[i] = std::max(peak_[i], current_[i]);
}

void Ledger::check_room(Role role, int64_t bytes) const {
  if (cap_ == 0 || is_off_device(role)) return;
  int64_t total = bytes;
  for (int i = 0; i < kNumRoles; ++i) total += is_off_device(static_cast<Role>(i)) ? 0 : current(static_cast<Role>(i));
  TORCH_CHECK_WITH(OutOfMemoryError, total <= cap_, "deeptide: cannot allocate ", bytes, " bytes for ", role_name(role),
                   ": the engine would take ", total, " bytes, and \"deeptide\": {\"device_memory_cap\"} is ", cap_,
                   ". ", text());
}

std::string Ledger::text() const {
  std::string text = "The engine holds";
  for (int i = 0; i < kNumRoles; ++i) {
    const Role role = static_cast<Role>(i);
    if (role >= Role::late_gradients && current(role) == 0) continue;
    text += std::string(i == 0 ? " " : ", ") + bytes_text(current(role)) + " of " + role_name(role);
  }
  const std::string advice = advice_ ? advice_() : "";
  return text + ". " + (advice.empty() ? "Use a higher ZeRO stage, more ranks or a smaller model." : advice);
}

void Ledger::set_advice(std::function<std::string()> advice) { advice_ = std::move(advice); }

int64_t Ledger::current(Role role) const {
  std::lock_guard lock(mutex_);
  return current_[static_cast<int>(role)];
}

int64_t Ledger::peak(Role role) const {
  std::lock_guard lock(mutex_);
  return peak_[static_cast<int>(role)];
}

Tensor allocate_flat(const std::shared_ptr<Ledger>& ledger, Role role, int64_t numel, ScalarType dtype,
                     at::Device device) {
  const c10::InferenceMode normal(false);  // a buffer first taken under inference_mode serves training later
  const int64_t bytes = bytes_of(numel, dtype);
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  ledger->check_room(role, bytes);
  if (!device.is_cpu()) {
    Tensor owner = allocate_on_device(*ledger, role, numel, options);
    ledger->add(role, bytes);
    return at::from_blob(
        owner.mutable_data_ptr(), {numel}, [owner, ledger, role, bytes](void*) { ledger->add(role, -bytes); }, options,
        device);  // or torch asks the driver whose address it is
  }
  const Mapping mapping = map_pages(*ledger, role, bytes);
  ledger->add(role, bytes);
  auto unmap = [mapping, ledger, role, bytes](void*) {
    ::munmap(mapping.start, mapping.length);
    ledger->add(role, -bytes);
  };
  return at::from_blob(mapping.start, {numel}, unmap, options);
}

BufferPool::BufferPool(std::shared_ptr<Ledger> ledger, Role role, at::Device device, int64_t max_waste, Source source,
                       std::optional<Lane> home)
    : ledger_(std::move(ledger)),
      role_(role),
      device_(device),
      max_waste_(max_waste),
      source_(std::move(source)),
      home_(home.value_or(Lane::current(device))) {}

void BufferPool::reserve(std::vector<int64_t> sizes) {
  std::lock_guard lock(mutex_);
  reserves_ = reserves_ || !sizes.empty();
  promised_.insert(promised_.end(), sizes.begin(), sizes.end());
}

bool BufferPool::has(int64_t numel, ScalarType dtype) {
  const int64_t bytes = bytes_of(numel, dtype);
  std::lock_guard lock(mutex_);
  return std::any_of(promised_.begin(), promised_.end(), [&](int64_t size) { return size >= bytes; }) ||
         std::any_of(idle_.begin(), idle_.end(), [&](const Idle& idle) { return fit(idle, bytes, INT64_MAX) >= 0; });
}

/// Returns the buffer's bytes if it serves the request, else -1.
int64_t BufferPool::fit(const Idle& idle, int64_t bytes, int64_t reached) const {
  const int64_t size = idle.buffer.numel();
  const bool wastes = !idle.is_reserved && size > max_waste_ * bytes;
  return size < bytes || wastes || idle.after > reached ? -1 : size;
}

/// Makes what is reserved and has no memory. If there is too little, the rest stays promised. Other takers wait: a
/// buffer of their own would go beyond the reserve.
void BufferPool::make_promised() {
  const std::lock_guard lock(mutex_);
  while (!promised_.empty()) {
    Tensor buffer = make(promised_.back(), INT64_MAX, /*is_promised=*/true);
    promised_.pop_back();
    reserved_.insert(buffer.const_data_ptr());
    idle_.push_back({std::move(buffer), home_.mark(), 0, true});
  }
}

BufferPool::Idle BufferPool::take_idle(int64_t bytes, int64_t reached) {
  std::lock_guard lock(mutex_);
  const auto chosen = least_waste(idle_, [&](const Idle& idle) { return fit(idle, bytes, reached); });
  if (chosen != idle_.end()) {
    Idle taken = std::move(*chosen);
    idle_.erase(chosen);
    return taken;
  }
  // A large new buffer replaces idle ones of other sizes: otherwise the peak would hold both.
  const bool is_too_much = bytes > most_bytes_ - ledger_->current(role_);
  if (bytes >= kLargeRequest || is_too_much) free_idle(0, reached, /*reserved_too=*/false);
  return {};
}

Tensor BufferPool::make(int64_t bytes, int64_t reached, bool is_promised) {
  const Lane::Scope at_home(home_);
  const Role role = reserves_ && !is_promised ? beyond_reserve(role_) : role_;
  const auto allocate = [&] {
    return source_ ? source_(bytes, role) : allocate_flat(ledger_, role, bytes, ScalarType::Byte, device_);
  };
  try {
    return allocate();
  } catch (const c10::OutOfMemoryError&) {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!is_promised) lock.lock();  // make_promised holds it
    free_idle(0, reached, /*reserved_too=*/!is_promised);
  }
  return allocate();
}

Tensor BufferPool::take(int64_t numel, ScalarType dtype, int64_t reached) {
  const int64_t bytes = bytes_of(numel, dtype);
  const Lane taker = Lane::current(device_);
  make_promised();
  Idle idle = take_idle(bytes, reached);
  taker.wait_for(idle.free_after);
  Tensor buffer = std::move(idle.buffer);
  if (!buffer.defined()) {
    buffer = make(bytes, reached);
    if (!(taker == home_)) taker.wait_for(home_.mark());
  }
  return buffer.narrow(0, 0, bytes).view(dtype);
}

void BufferPool::put(Tensor buffer, int64_t after) {
  if (!buffer.defined()) return;
  const int64_t bytes = static_cast<int64_t>(buffer.storage().nbytes());
  Tensor whole = at::empty({0}, at::TensorOptions().dtype(ScalarType::Byte).device(device_));
  whole.set_(buffer.storage(), 0, {bytes}, {1});
  Mark free_after = Lane::current(device_).mark();
  std::lock_guard lock(mutex_);
  const bool is_reserved = reserved_.contains(whole.const_data_ptr());
  idle_.push_back({std::move(whole), std::move(free_after), after, is_reserved});
}

void BufferPool::trim(int64_t bytes) {
  std::lock_guard lock(mutex_);
  free_idle(bytes, INT64_MAX);
}

BufferPool::~BufferPool() {
  try {
    free_idle(0, INT64_MAX);
  } catch (const std::exception&) {  // at a process's end the device may be gone
  }
}

/// An allocator gives the memory to the home lane anew, at once.
void BufferPool::free_idle(int64_t but_bytes, int64_t reached, bool reserved_too) {
  int64_t total = 0;
  for (const Idle& idle : idle_) total += idle.buffer.numel();
  std::erase_if(idle_, [&](const Idle& idle) {
    if (total <= but_bytes || idle.after > reached || (idle.is_reserved && !reserved_too)) return false;
    total -= idle.buffer.numel();
    if (idle.is_reserved) {
      reserved_.erase(idle.buffer.const_data_ptr());
      promised_.push_back(idle.buffer.numel());
    }
    home_.wait_for(idle.free_after);
    return true;
  });
}

int64_t PoolForecast::take(int64_t bytes) {
  const auto chosen =
      least_waste(idle_, [&](int64_t idle) { return idle < bytes || idle > max_waste_ * bytes ? -1 : idle; });
  if (chosen != idle_.end()) {
    const int64_t taken = *chosen;
    idle_.erase(chosen);
    return taken;
  }
  if (bytes >= kLargeRequest) {
    for (const int64_t idle : std::exchange(idle_, {})) allocated_ -= idle;
  }
  allocated_ += bytes;
  peak_ = std::max(peak_, allocated_);
  return bytes;
}

}  // namespace deeptide::device
