// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies between a device and the host that steps for it: what arrives, in which order, and how long a step takes.
#include "zero/transfers/host_exchange.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;
using tiers::Block;
using zero::HostExchange;
using zero::kHostBlockNumel;

Machine& machine() { return Machine::instance(); }

Tensor on_device(const Tensor& values) {
  Tensor tensor = empty_simulated(values.sizes(), values.scalar_type());
  tensor.copy_(values);
  return tensor;
}

/// Each unit's new parameters are twice its gradient.
class Exchange : public EverySchedule {
 protected:
  void SetUp() override {
    Settings settings;
    settings.guard_pinned = true;  // an access of the host to what is still copied ends the process
    configure(settings);
  }

  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();

  static void step_block(HostExchange::Step& step, int unit, Block block, const Tensor& parameters) {
    const Tensor gradient = step.gradient(unit, block);
    const Tensor values = step.parameters(block.count, parameters.scalar_type());
    values.copy_(gradient * 2);
    step.send(values, parameters.narrow(0, block.begin, block.count));
  }
};

TEST_P(Exchange, ReturnsWhatTheHostMadeOfEachBlock) {
  const std::vector<int64_t> sizes = {2 * kHostBlockNumel + 5, 7, 3 * kHostBlockNumel};
  HostExchange exchange(ledger, simulated_device(), sizes.back());
  EXPECT_EQ(ledger->current(device::Role::host_optimizer), HostExchange::forecast(sizes.back()));
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    std::vector<Tensor> gradients, parameters;
    for (const int64_t numel : sizes) {
      gradients.push_back(on_device(at::arange(numel, at::kFloat)) + 1);
      parameters.push_back(on_device(at::zeros({numel}, type)));
    }
    {
      HostExchange::Step step(exchange);
      for (int unit = 0; unit < 3; ++unit) step.announce(unit, gradients[static_cast<size_t>(unit)]);
      for (int unit = 0; unit < 3; ++unit) {
        const Tensor& own = parameters[static_cast<size_t>(unit)];
        for (int64_t begin = 0; begin < own.numel(); begin += kHostBlockNumel) {
          const int64_t count = std::min(kHostBlockNumel, own.numel() - begin), half = count / 2;
          step_block(step, unit, {begin, half}, own);  // parts of a block, as two groups of a unit
          step_block(step, unit, {begin + half, count - half}, own);
        }
        step.join();
      }
    }
    for (size_t unit = 0; unit < sizes.size(); ++unit) {
      const Tensor expected = ((at::arange(sizes[unit], at::kFloat) + 1) * 2).to(type);
      EXPECT_TRUE(at::equal(parameters[unit].cpu(), expected)) << unit;
    }
  }
}

TEST_P(Exchange, PassesOverWhatIsNotAskedFor) {
  constexpr int64_t kBlocks = 8;
  HostExchange exchange(ledger, simulated_device(), kBlocks * kHostBlockNumel);
  for (int round = 0; round < 2; ++round) {
    const Tensor first = on_device(at::arange(kBlocks * kHostBlockNumel, at::kFloat));
    HostExchange::Step step(exchange);
    step.announce(0, first);
    step.announce(1, first);
    for (const auto& [unit, index] : {std::pair(0, 1), {0, 7}, {1, 6}}) {
      const Tensor got = step.gradient(unit, {index * kHostBlockNumel + 3, 2});
      EXPECT_EQ(got[1].item<float>(), static_cast<float>(index * kHostBlockNumel + 4));
    }
    EXPECT_ANY_THROW(step.gradient(1, {0, 1}));  // it has been passed
  }
}

TEST_P(Exchange, EndsWithAStepThatFails) {
  const Tensor parameters = on_device(at::zeros({4 * kHostBlockNumel}));
  const Tensor zeros = parameters.clone(), ones = parameters + 1;
  {
    HostExchange exchange(ledger, simulated_device(), parameters.numel());
    try {
      HostExchange::Step step(exchange);
      step.announce(0, zeros);
      step_block(step, 0, {0, 100}, parameters);
      throw std::runtime_error("planted");
    } catch (const std::runtime_error&) {
    }
    HostExchange::Step again(exchange);
    again.announce(0, ones);
    step_block(again, 0, {3 * kHostBlockNumel, 100}, parameters);
  }
  EXPECT_EQ(ledger->current(device::Role::host_optimizer), 0);
  EXPECT_EQ(parameters.cpu()[3 * kHostBlockNumel].item<float>(), 2);
}

/// A step that forgot to wait for a copy would do this.
TEST_P(Exchange, FindsAMissingWait) {
  const Tensor gradient = on_device(at::zeros({1000}));
  const Tensor pinned = at::empty({1000}, at::TensorOptions().pinned_memory(true));
  pinned.copy_(gradient, /*non_blocking=*/true);
  EXPECT_ANY_THROW(machine().host_access(pinned.const_data_ptr(), pinned.nbytes(), false, "a rule's step"));
  EXPECT_TRUE(has_match(machine().settle(), "the host .a rule's step. reads .*the host has not waited for it"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, Exchange, every_schedule(), schedule_name);

struct Lengths {
  double out, step, in;  // seconds per block
};

/// Simulated seconds of a step of `blocks` blocks.
double seconds_of_step(const Lengths& lengths, int64_t blocks) {
  const double bytes = kHostBlockNumel * sizeof(float);
  const auto bandwidth = [&](double seconds) { return seconds > 0 ? bytes / seconds : 0; };
  Settings settings;
  settings.bandwidths = {0, bandwidth(lengths.in), bandwidth(lengths.out), 0};
  const Tensor gradient = on_device(at::zeros({blocks * kHostBlockNumel}));
  const Tensor parameters = on_device(at::zeros({blocks * kHostBlockNumel}));
  HostExchange exchange(std::make_shared<device::Ledger>(), simulated_device(), gradient.numel());
  guard().synchronizeDevice(0);
  machine().configure(settings);
  const double start = machine().host_time_s();
  {
    HostExchange::Step step(exchange);
    step.announce(0, gradient);
    for (int64_t i = 0; i < blocks; ++i) {
      const Block block{i * kHostBlockNumel, kHostBlockNumel};
      const Tensor got = step.gradient(0, block);
      const Tensor values = step.parameters(block.count, at::kFloat);
      values.copy_(got);
      machine().host_works(lengths.step);
      step.send(values, parameters.narrow(0, block.begin, block.count));
    }
  }
  guard().synchronizeDevice(0);
  const double seconds = machine().host_time_s() - start;
  EXPECT_EQ(machine().settle(), "");
  machine().configure({});
  return seconds;
}

TEST(ExchangeTime, IsThatOfTheLongestOfCopiesAndStep) {
  constexpr int64_t kBlocks = 24;
  for (const Lengths& lengths : {Lengths{1, 1, 1}, {2, 1, 1}, {1, 3, 1}, {0.5, 1, 2}, {1, 2, 0.5}}) {
    const double longest = std::max({lengths.out, lengths.step, lengths.in});
    const double fill = lengths.out + lengths.step + lengths.in - longest;  // of the pipeline
    const double seconds = seconds_of_step(lengths, kBlocks);
    const double ideal = kBlocks * longest + fill;
    RecordProperty("ratio_to_ideal", std::to_string(seconds / ideal));
    EXPECT_GE(seconds, 0.999 * ideal);
    EXPECT_LE(seconds, 1.05 * ideal) << lengths.out << ", " << lengths.step << ", " << lengths.in;
  }
}

}  // namespace
}  // namespace deeptide::simulated
