// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The share of states that files take for nothing.
#include "engine/bind/offload_ratio.h"

#include <gtest/gtest.h>

namespace deeptide::engine {
namespace {

TEST(OffloadRatio, LetsTransfersTakeAsLongAsTheStep) {
  EXPECT_EQ(balanced_ratio({.step_seconds = 1.0, .transfer_seconds = 2.0}), 0.5);
  EXPECT_EQ(balanced_ratio({.step_seconds = 1.0, .transfer_seconds = 3.0}), 0.33);
  EXPECT_EQ(balanced_ratio({.step_seconds = 3.0, .transfer_seconds = 2.0}), 1.0) << "a fast drive holds all";
  EXPECT_EQ(balanced_ratio({.step_seconds = 0.001, .transfer_seconds = 2.0}), 0.0);
}

TEST(OffloadRatio, LetsHostAndDeviceStepEquallyLong) {
  EXPECT_EQ(balanced_host_share({.device_seconds = 1.0, .host_seconds = 3.0}), 0.25);
  EXPECT_EQ(balanced_host_share({.device_seconds = 1.0, .host_seconds = 2.0}), 0.33);
  EXPECT_EQ(balanced_host_share({.device_seconds = 0.001, .host_seconds = 2.0}), 0.0);
  EXPECT_EQ(balanced_host_share({.device_seconds = 1.0, .host_seconds = 0.0}), 1.0);
}

TEST(OffloadRatio, TimesStepsOfEveryKindAndTransfersOfAFolder) {
  const tiers::OffloadOptions options{.folders = {testing::TempDir()}};
  for (const char* type : {"AdamW", "SGD", "LAMB"}) {
    const auto ledger = std::make_shared<device::Ledger>();
    const Hyperparameters hyper(type);
    const BlockTimes times = time_blocks({optim::find_rule(type), hyper, ledger, device::Role::optimizer, options});
    EXPECT_GT(times.step_seconds, 0.0);
    EXPECT_GT(times.transfer_seconds, 0.0);
    EXPECT_EQ(ledger->current(device::Role::optimizer), 0);
    EXPECT_EQ(ledger->peak(device::Role::optimizer), bytes_to_measure());
  }
}

TEST(OffloadRatio, NamesAFolderThatCannotBeUsed) {
  const tiers::OffloadOptions options{.folders = {"/proc/none"}};
  try {
    const Hyperparameters hyper("Adam");
    const auto ledger = std::make_shared<device::Ledger>();
    time_blocks({optim::find_rule("Adam"), hyper, ledger, device::Role::optimizer, options});
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("/proc/none"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace deeptide::engine
