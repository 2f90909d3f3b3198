// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parameters that leave a device: what arrives in their shards, and when masters may change.
#include "zero/transfers/parameters_out.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <memory>

#include "simulated/streams.h"
#include "tiers/copied_store.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;
using device::Ledger;
using device::Role;
using tiers::Access;
using tiers::Buffer;
using zero::ParametersOut;

constexpr int64_t kBlock = int64_t{1} << 21;  // elements of 16 bits that are narrowed at a time

Buffer page_locked(int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).pinned_memory(true);
  return tiers::copied_buffer(Buffer::resident(at::empty({numel}, options)), std::make_shared<tiers::ReadsUnderWay>());
}

/// An access of the host to what is still copied ends the process.
class Leaving : public EverySchedule {
 protected:
  void SetUp() override {
    Settings settings;
    settings.guard_pinned = true;
    configure(settings);
  }

  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
};

TEST_P(Leaving, BringsEachStepsValuesToTheShard) {
  const int64_t numel = 3 * kBlock + 5;
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    const int64_t narrowed = dtype == at::kFloat ? 0 : 2 * numel;
    ParametersOut out(ledger, simulated_device(), narrowed);
    EXPECT_EQ(ledger->current(Role::optimizer), ParametersOut::forecast(narrowed));
    EXPECT_EQ(ParametersOut::forecast(narrowed), dtype == at::kFloat ? 0 : 4 * kBlock);
    const Buffer shard = page_locked(numel + 7, dtype);
    shard.lease({0, numel + 7}, Access::write).tensor().zero_();
    Tensor master = empty_simulated({numel});
    master.copy_(at::arange(numel, at::kFloat));
    for (int step = 0; step < 2; ++step) {
      out.join();
      master.add_(0.3);
      out.send(master, shard, 7);
    }
    const Tensor expected = (at::arange(numel, at::kFloat) + 0.3 + 0.3).to(dtype);
    const auto lease = shard.lease({0, numel + 7}, Access::read);
    EXPECT_TRUE(at::equal(lease.tensor().narrow(0, 7, numel), expected));
    EXPECT_FALSE(lease.tensor().narrow(0, 0, 7).any().item<bool>());
  }
  EXPECT_EQ(ledger->current(Role::optimizer), 0);
}

/// A step that forgot to join would do this.
TEST_P(Leaving, FindsAMasterThatChangesTooEarly) {
  Tensor master = empty_simulated({1000});
  master.zero_();
  const Buffer shard = page_locked(1000, at::kFloat);
  {
    ParametersOut out(ledger, simulated_device(), 0);
    out.send(master, shard, 0);
    EXPECT_ANY_THROW(master.add_(1));
  }
  EXPECT_TRUE(has_match(Machine::instance().settle(), "writes bytes .* that 'copy_ device to host' .* reads"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, Leaving, every_schedule(), schedule_name);

}  // namespace
}  // namespace deeptide::simulated
