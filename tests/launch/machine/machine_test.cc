// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Devices and programs of this machine.
#include "launch/machine/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "launch/launched.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

TEST(CountDevices, CountsTheNumberedNodesOnly) {
  TempFolder dev;
  EXPECT_EQ(count_devices(dev.path(""), nullptr), 0);
  for (const char* name : {"nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "null"}) {
    std::ofstream(dev.path(name)).put('x');
  }
  EXPECT_EQ(count_devices(dev.path(""), nullptr), 3);
}

TEST(CountDevices, HonoursTheVisibleOnes) {
  TempFolder dev;
  for (const char* name : {"nvidia0", "nvidia1", "nvidia2"}) std::ofstream(dev.path(name)).put('x');
  const std::map<std::string, int> cases = {{"", 0},   {"0", 1},           {"2,0", 2},      {"0,-1,1", 1},
                                            {"-1", 0}, {"GPU-a,GPU-b", 2}, {"0,1,2,3,4", 3}};
  for (const auto& [visible, expected] : cases) {
    EXPECT_EQ(count_devices(dev.path(""), visible.c_str()), expected) << "CUDA_VISIBLE_DEVICES=" << visible;
  }
}

TEST(CountDevices, IsZeroWithoutTheFolder) { EXPECT_EQ(count_devices("/no/such/folder", nullptr), 0); }

TEST(FindProgram, SearchesThePathButNotForPaths) {
  EXPECT_EQ(find_program("./sh"), "./sh");
  EXPECT_EQ(find_program("no-such-program-anywhere"), "");
  EXPECT_EQ(access(find_program("sh").c_str(), X_OK), 0);
}

TEST(UsableCores, AreAtLeastOne) { EXPECT_GE(usable_cores().size(), 1u); }

}  // namespace
}  // namespace deeptide::launch
