// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Devices, ports and programs of this machine.
#include "launch/system/machine.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "launch/launched.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

/// A port that something listens on.
class BusyPort {
 public:
  BusyPort() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  ~BusyPort() { close(listener_); }

  int port() const { return port_; }

 private:
  int listener_;
  int port_ = 0;
};

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

TEST(ChoosePort, FindsAFreeOne) {
  const int port = choose_port(0);
  EXPECT_GT(port, 0);
  EXPECT_EQ(choose_port(port), port);
}

TEST(ChoosePort, NamesABusyPort) {
  BusyPort busy;
  const std::string port = std::to_string(busy.port());
  EXPECT_THROW(choose_port(busy.port()), UsageError);
  const LaunchResult result = launch({"--master_port", port, "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.errors.find("--master_port " + port + " cannot be used"), std::string::npos) << result.errors;
}

TEST(FindProgram, SearchesThePathButNotForPaths) {
  EXPECT_EQ(find_program("./sh"), "./sh");
  EXPECT_EQ(find_program("no-such-program-anywhere"), "");
  EXPECT_EQ(access(find_program("sh").c_str(), X_OK), 0);
}

TEST(UsableCores, AreAtLeastOne) { EXPECT_GE(usable_cores().size(), 1u); }

}  // namespace
}  // namespace deeptide::launch
