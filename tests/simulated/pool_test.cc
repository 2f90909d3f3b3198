// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pools hand buffers from lane to lane: each use comes after the last, and so does what their memory is used for next.
#include <ATen/ops/stack.h>

#include "device/memory/memory.h"
#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;
using device::BufferPool;
using device::Lane;
using device::Ledger;
using device::Role;

constexpr int64_t kNumel = 1000;

class Pools : public EverySchedule {
 protected:
  /// Fills a buffer on one lane, reads it on another, and gives it back there.
  Tensor pass_on(BufferPool& pool, double value) {
    Tensor buffer;
    {
      const Lane::Scope scope(arrivals_);
      buffer = pool.take(kNumel, at::kFloat);
      buffer.fill_(value);
    }
    uses_.wait_for(arrivals_.mark());
    const Lane::Scope scope(uses_);
    Tensor sum = buffer.sum();
    pool.put(std::move(buffer));
    return sum;
  }

  Lane arrivals_ = Lane::create(simulated_device()), uses_ = Lane::create(simulated_device());
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
};

TEST_P(Pools, AskNoDriverWhoseMemoryTheyHave) {
  const int64_t before = num_address_questions();
  const Tensor flat = device::allocate_flat(ledger_, Role::gathered, kNumel, at::kFloat, simulated_device());
  EXPECT_EQ(num_address_questions(), before);
  EXPECT_EQ(flat.device(), simulated_device());
}

TEST_P(Pools, RefillABufferAfterItsLastUse) {
  BufferPool pool(ledger_, Role::gathered, simulated_device(), /*max_waste=*/1, {}, arrivals_);
  std::vector<Tensor> sums;
  for (int i = 0; i < 8; ++i) sums.push_back(pass_on(pool, i));
  EXPECT_EQ(ledger_->peak(Role::gathered), kNumel * 4) << "one buffer serves all";
  const Lane::Scope scope(uses_);
  const Tensor found = at::stack(sums).cpu();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(found.const_data_ptr<float>()[i], static_cast<float>(i * kNumel));
}

TEST_P(Pools, FreeIdleBuffersForTheHomeLaneAfterTheirLastUse) {
  std::vector<Tensor> sums;
  {
    BufferPool pool(ledger_, Role::gathered, simulated_device(), /*max_waste=*/1, {}, arrivals_);
    sums.push_back(pass_on(pool, 1));
    pool.trim();
    sums.push_back(pass_on(pool, 2));
  }
  {
    const Lane::Scope scope(arrivals_);
    empty_simulated({kNumel}).fill_(-1);  // the same memory, if the checker did not look
  }
  const Lane::Scope scope(uses_);
  const Tensor found = at::stack(sums).cpu();
  EXPECT_EQ(found.const_data_ptr<float>()[0], kNumel);
  EXPECT_EQ(found.const_data_ptr<float>()[1], 2 * kNumel);
}

TEST_P(Pools, LendMemoryOfTheirHomeToOtherLanes) {
  BufferPool pool(ledger_, Role::gathered, simulated_device());  // of the default lane
  const Tensor sum = pass_on(pool, 3);
  const Lane::Scope scope(uses_);
  EXPECT_EQ(sum.cpu().item<float>(), 3 * kNumel);
}

INSTANTIATE_TEST_SUITE_P(Schedules, Pools, every_schedule(), schedule_name);

}  // namespace
}  // namespace deeptide::simulated
