// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pinned memory is one device type's: to another it is any memory of the host, and copies make the host wait.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "device/memory/page_locked.h"
#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;

constexpr int64_t kLarge = 1 << 20;  // bytes: more than are staged

bool is_pinned_for_it(const Tensor& tensor) {
  return at::globalContext().isPinnedPtr(tensor.const_data_ptr(), kSimulated);
}

class Pinned : public EverySchedule {
 protected:
  static void configure(bool for_another) {
    at::set_num_threads(1);  // a stream's thread keeps the number that it began with
    Settings settings;
    settings.pins_for_another = for_another;
    EverySchedule::configure(settings);
    Machine::instance().host_waits();
  }
};

TEST_P(Pinned, MemoryLetsTheHostGoOn) {
  configure(false);
  const Tensor host = device::allocate_page_locked(kLarge, simulated_device()).fill_(7);
  EXPECT_TRUE(is_pinned_for_it(host));
  const Tensor back = device::allocate_page_locked(kLarge, simulated_device());
  back.copy_(host.to(simulated_device(), /*non_blocking=*/true), /*non_blocking=*/true);
  EXPECT_TRUE(Machine::instance().host_waits().empty());
  guard().synchronizeDevice(0);
  EXPECT_TRUE(at::equal(back, host));
}

TEST_P(Pinned, MemoryOfAnotherTypeMakesTheHostWait) {
  configure(true);
  testing::internal::CaptureStderr();
  const Tensor host = device::allocate_page_locked(kLarge, simulated_device()).fill_(7);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_FALSE(is_pinned_for_it(host));
  static bool told = false;  // once in a process
  EXPECT_EQ(has_match(text, "page-locked memory is not for sim:0.*CUDA_VISIBLE_DEVICES="), !std::exchange(told, true));
  const Tensor there = host.to(simulated_device(), /*non_blocking=*/true);
  EXPECT_EQ(Machine::instance().host_waits(), std::vector<std::string>{"copy_ host to device"});
  host.zero_();  // it has been read
  const Tensor back = at::empty_like(host);
  back.copy_(there, /*non_blocking=*/true);
  EXPECT_EQ(Machine::instance().host_waits(), std::vector<std::string>{"copy_ device to host"});
  EXPECT_TRUE(at::equal(back, at::full({kLarge}, 7, at::kByte)));  // the host knows that it is there
}

TEST_P(Pinned, MemoryIsNotNeededForWhatIsStaged) {
  configure(false);
  const auto bytes = static_cast<int64_t>(Settings().staged_bytes);
  for (const int64_t size : {bytes, bytes + 1}) {
    const Tensor there = at::zeros({size}, at::kByte).to(simulated_device(), /*non_blocking=*/true);
    EXPECT_EQ(Machine::instance().host_waits().size(), size > bytes ? 1U : 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Pinned, every_schedule(), schedule_name);

}  // namespace
}  // namespace deeptide::simulated
