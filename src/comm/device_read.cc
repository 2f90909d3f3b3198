// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies to page-locked memory and polls the mark behind the copy.
#include "comm/device_read.h"

#include <thread>

#include "device/lane.h"
#include "device/memory/page_locked.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::steady_clock;

namespace {

/// Work that a device has been given, up to a mark.
class DeviceWork : public Operation {
 public:
  explicit DeviceWork(device::Mark end) : end_(std::move(end)) {}

  bool ready() override { return end_.passed(); }

  bool advance(std::chrono::milliseconds limit) override {
    const auto last = steady_clock::now() + limit;
    for (int look = 0; !end_.passed(); ++look) {
      if (steady_clock::now() >= last) return false;
      if (look < kQuickLooks) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kPause);
      }
    }
    return true;
  }

 private:
  static constexpr int kQuickLooks = 50;
  static constexpr std::chrono::microseconds kPause{20};

  device::Mark end_;
};

}  // namespace

Tensor read_on_host(Group& group, const Tensor& tensor, const Site& site) {
  if (tensor.is_cpu() || group.size() == 1) return tensor.cpu();
  const Tensor memory = device::allocate_page_locked(static_cast<int64_t>(tensor.nbytes()), tensor.device());
  Tensor host = memory.view(tensor.scalar_type()).view(tensor.sizes());
  host.copy_(tensor, /*non_blocking=*/true);
  Pending copied(std::make_shared<DeviceWork>(device::Lane::current(tensor.device()).mark()));
  group.wait(copied, site);
  return host;
}

}  // namespace deeptide::comm
