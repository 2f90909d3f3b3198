// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums that leave a device during backward: what arrives, what waits for what, and how long it takes.
#include "gradients/cpu_sums.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;
using device::Lane;
using device::Ledger;
using device::Role;
using gradients::CpuPart;
using gradients::CpuSums;

constexpr int64_t kBlock = CpuPart::kBlock;
const std::vector<CpuSums::Cut> kCuts = {{2 * kBlock + 5, 0}, {7, 0}, {kBlock, kBlock / 2}, {100, 100}, {kBlock, 64}};

Machine& machine() { return Machine::instance(); }

/// An access of the host to what is still copied ends the process.
class SumsOnTheHost : public EverySchedule {
 protected:
  void SetUp() override {
    Settings settings;
    settings.guard_pinned = true;
    configure(settings);
  }

  /// A micro-batch's gradients.
  static Tensor contribution(int unit, int micro) {
    return at::arange(kCuts[static_cast<size_t>(unit)].numel, at::kFloat) * (micro + 1) + unit;
  }
  /// Backward reaches the last unit first. On a lane of its own, as sums are.
  void add_all(CpuSums& sums, int micro) {
    std::vector<Tensor> sources;  // alive until the lane has read them
    for (int unit = static_cast<int>(kCuts.size()) - 1; unit >= 0; --unit) {
      if (!sums.has(unit)) continue;
      Tensor source = empty_simulated({kCuts[static_cast<size_t>(unit)].numel});
      source.copy_(contribution(unit, micro));
      const Lane filling = Lane::current(simulated_device());
      lane_.wait_for(filling.mark());
      const Lane::Scope scope(lane_);
      sums.change(unit, micro == 0, [&](const Tensor& sum) {
        if (micro == 0) {
          sum.copy_(source);
        } else {
          sum.add_(source);
        }
      });
      sources.push_back(std::move(source));
    }
    Lane::current(simulated_device()).wait_for(lane_.mark());
  }
  static Tensor expected(int unit, int num_micros) {
    Tensor sum = contribution(unit, 0);
    for (int micro = 1; micro < num_micros; ++micro) sum += contribution(unit, micro);
    return sum;
  }
  void expect_sums(CpuSums& sums, int num_micros) {
    for (int unit = 0; unit < static_cast<int>(kCuts.size()); ++unit) {
      if (!sums.has(unit)) continue;
      const CpuSums::Cut& cut = kCuts[static_cast<size_t>(unit)];
      const Tensor all = expected(unit, num_micros);
      const auto gradient = sums.gradient(unit);
      for (int64_t begin = 0; begin < cut.numel - cut.stays; begin += kBlock) {
        const int64_t count = std::min(kBlock, cut.numel - cut.stays - begin);
        EXPECT_TRUE(at::equal(gradient.on_host->read({begin, count}), all.narrow(0, cut.stays + begin, count))) << unit;
      }
      EXPECT_TRUE(at::equal(gradient.rows.rows[0].cpu(), all.narrow(0, 0, cut.stays))) << unit;
      EXPECT_TRUE(at::equal(gradient.sum().cpu(), all)) << unit;
      const Tensor stepped = gradient.sum_where_stepped();
      EXPECT_EQ(stepped.is_cpu(), cut.stays == 0);
      EXPECT_TRUE(at::equal(stepped.cpu(), all)) << unit;
    }
  }

  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  Lane lane_ = Lane::create(simulated_device());
};

TEST_P(SumsOnTheHost, AreThoseOfAllMicroBatches) {
  CpuSums sums(ledger_, simulated_device(), kCuts, at::kFloat);
  EXPECT_FALSE(sums.has(3));
  for (int step = 0; step < 2; ++step) {
    for (int micro = 0; micro < 3; ++micro) {
      add_all(sums, micro);
      if (micro != 1) expect_sums(sums, micro + 1);
    }
  }
}

TEST_P(SumsOnTheHost, AreLentToTheDeviceOneAfterAnother) {
  CpuSums sums(ledger_, simulated_device(), kCuts, at::kFloat);
  EXPECT_TRUE(at::equal(sums.gradient(4).sum().cpu(), at::zeros({kBlock}))) << "nothing has left";
  for (int step = 0; step < 2; ++step) {
    add_all(sums, 0);
    machine().host_waits();
    std::vector<std::pair<int, Tensor>> doubled;
    for (int unit = 0; unit < static_cast<int>(kCuts.size()); ++unit) {
      if (sums.has(unit)) doubled.emplace_back(unit, sums.lend(unit) * 2);
    }
    EXPECT_TRUE(machine().host_waits().empty());
    add_all(sums, 0);  // in the buffers that were lent
    for (const auto& [unit, twice] : doubled) EXPECT_TRUE(at::equal(twice.cpu(), contribution(unit, 0) * 2)) << unit;
  }
}

TEST_P(SumsOnTheHost, LetTheHostWaitForNothingBeforeItReads) {
  CpuSums sums(ledger_, simulated_device(), kCuts, at::kFloat);
  const Tensor ones = empty_simulated({kCuts[0].numel}).fill_(1);
  machine().host_waits();
  for (int micro = 0; micro < 4; ++micro) {
    sums.change(0, micro == 0, [&](const Tensor& sum) { micro == 0 ? sum.copy_(ones) : sum.add_(ones); });
    sums.change(2, micro == 0, [&](const Tensor& sum) { sum.fill_(micro); });
  }
  EXPECT_TRUE(machine().host_waits().empty());
  EXPECT_EQ(sums.gradient(0).on_host->read({kBlock, 1}).item<float>(), 4);
}

TEST_P(SumsOnTheHost, GiveTheDevicesMemoryBackAndTakeItAnew) {
  const auto forecast = CpuSums::forecast(kCuts, at::kFloat);
  const int64_t ring = 3 * kBlock + 5, stays = kBlock / 2 + 64;
  EXPECT_EQ(forecast.on_device, 4 * (ring + stays));
  EXPECT_GE(forecast.on_host, 4 * (4 * kBlock + 12 - stays));
  {
    CpuSums sums(ledger_, simulated_device(), kCuts, at::kFloat);
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(ledger_->current(Role::gradients), forecast.on_device);
      EXPECT_EQ(ledger_->current(Role::host_gradients), forecast.on_host);
      add_all(sums, 0);
      expect_sums(sums, 1);
      sums.release_memory();
      EXPECT_EQ(ledger_->current(Role::gradients), 0);
      const Tensor other = empty_simulated({3 * kBlock}).fill_(-1);  // in the memory that was given back
      add_all(sums, 0);
      expect_sums(sums, 1);
    }
    EXPECT_EQ(ledger_->peak(Role::gradients), forecast.on_device);
    EXPECT_EQ(ledger_->peak(Role::host_gradients), forecast.on_host);
    add_all(sums, 0);  // copies are under way at the end
  }
  EXPECT_EQ(ledger_->current(Role::gradients), 0);
  EXPECT_EQ(ledger_->current(Role::host_gradients), 0);
}

/// A step that forgot to wait for a block would do this.
TEST_P(SumsOnTheHost, FindAMissingWait) {
  CpuSums sums(ledger_, simulated_device(), {{1000, 0}}, at::kFloat);
  sums.change(0, true, [](const Tensor& sum) { sum.fill_(1); });
  const auto gradient = sums.gradient(0);
  const Tensor& values = gradient.on_host->values;
  EXPECT_ANY_THROW(machine().host_access(values.const_data_ptr(), values.nbytes(), false, "a rule's step"));
  EXPECT_TRUE(has_match(machine().settle(), "the host .a rule's step. reads .*the host has not waited for it"));
  gradient.on_host->read({0, 1000});
  EXPECT_NO_THROW(machine().host_access(values.const_data_ptr(), values.nbytes(), false, "a rule's step"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, SumsOnTheHost, every_schedule(), schedule_name);

struct Lengths {
  double backward, out, in;  // seconds per unit
};

/// Simulated seconds of micro-batches of `units` units each, and until the host has all.
double seconds_of(const Lengths& lengths, int units, int micros) {
  const double bytes = kBlock * sizeof(float);
  const auto bandwidth = [&](double seconds) { return seconds > 0 ? bytes / seconds : 0; };
  Settings settings;
  settings.bandwidths = {bandwidth(lengths.backward), bandwidth(lengths.in), bandwidth(lengths.out), 0};
  CpuSums sums(std::make_shared<Ledger>(), simulated_device(), std::vector<CpuSums::Cut>(units, {kBlock, 0}),
               at::kFloat);
  const Tensor activations = empty_simulated({kBlock});
  const Lane lane = Lane::create(simulated_device());
  guard().synchronizeDevice(0);
  machine().configure(settings);
  const double start = machine().host_time_s();
  for (int micro = 0; micro < micros; ++micro) {
    for (int unit = units - 1; unit >= 0; --unit) {
      activations.fill_(micro);  // the unit's backward
      lane.wait_for(Lane::current(simulated_device()).mark());
      const Lane::Scope scope(lane);
      sums.change(unit, micro == 0, [](const Tensor& sum) { sum.narrow(0, 0, 64).fill_(1); });
    }
  }
  guard().synchronizeDevice(0);
  const double seconds = machine().host_time_s() - start;
  EXPECT_EQ(machine().settle(), "");
  machine().configure({});
  return seconds;
}

TEST(TimeOfSumsOnTheHost, IsThatOfTheLongestOfBackwardAndCopies) {
  constexpr int kUnits = 24;
  for (const int micros : {1, 3}) {
    for (const Lengths& lengths : {Lengths{2, 1, 1}, {1, 1, 1}, {1, 0.9, 0.5}, {3, 2, 1}, {1, 2, 1}}) {
      const double backward = seconds_of({lengths.backward, 0, 0}, kUnits, micros);
      EXPECT_GE(backward, kUnits * micros * lengths.backward);
      const double seconds = seconds_of(lengths, kUnits, micros);
      const double ideal = std::max(backward + lengths.out, lengths.backward + kUnits * micros * lengths.out);
      RecordProperty("ratio_to_ideal", std::to_string(seconds / ideal));
      EXPECT_GE(seconds, 0.999 * ideal);
      EXPECT_LE(seconds, 1.05 * ideal) << lengths.backward << ", " << lengths.out << ", " << lengths.in << ", "
                                       << micros;
    }
  }
}

}  // namespace
}  // namespace deeptide::simulated
