// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A job's port from before its ranks start until they meet there.
#include "launch/machine/held_port.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "launch/launched.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

/// Another program's socket.
class OtherSocket {
 public:
  explicit OtherSocket(bool reuses_address = false) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    const int reuse = reuses_address ? 1 : 0;
    EXPECT_EQ(setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse)), 0);
  }
  ~OtherSocket() { close(socket_); }
  OtherSocket(const OtherSocket&) = delete;
  OtherSocket& operator=(const OtherSocket&) = delete;

  bool listen_at(int port) {
    const sockaddr_in address = loopback(port);
    return bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 && listen(socket_, 1) == 0;
  }
  bool connect_to(int port) {
    const sockaddr_in address = loopback(port);
    return connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  int port() const {
    sockaddr_in address{};
    socklen_t length = sizeof(address);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    return ntohs(address.sin_port);
  }

 private:
  static sockaddr_in loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }

  int socket_;
};

TEST(HeldPort, IsAFreeOneOrTheOneThatIsWanted) {
  const int port = HeldPort::choose(0).number();
  EXPECT_GT(port, 0);
  EXPECT_EQ(HeldPort::choose(port).number(), port);
}

TEST(HeldPort, IsLeftToRankZeroAlone) {
  const HeldPort held = HeldPort::choose(0);
  EXPECT_FALSE(OtherSocket().listen_at(held.number()));
  OtherSocket store(/*reuses_address=*/true);
  EXPECT_TRUE(store.listen_at(held.number()));
  EXPECT_TRUE(OtherSocket().connect_to(held.number()));
}

TEST(HeldPort, IsFreeAgainWhenItIsNotHeld) {
  int port = 0;
  {
    HeldPort held = HeldPort::choose(0);
    port = held.number();
    const HeldPort moved = std::move(held);
    EXPECT_FALSE(OtherSocket().listen_at(port));
  }
  EXPECT_TRUE(OtherSocket().listen_at(port));
}

TEST(HeldPort, DiffersBetweenTwoLaunchersThatStartAtOnce) {
  const int free = HeldPort::choose(0).number();
  const HeldPort first = HeldPort::first_free(free), second = HeldPort::first_free(free);
  EXPECT_GE(first.number(), free);
  EXPECT_GT(second.number(), first.number());
}

TEST(HeldPort, NamesWhoListensAtABusyOne) {
  OtherSocket busy;
  ASSERT_TRUE(busy.listen_at(0));
  EXPECT_THROW(HeldPort::choose(busy.port()), UsageError);
  const std::string port = std::to_string(busy.port());
  const LaunchResult result = launch({"--master_port", port, "true"});
  EXPECT_EQ(result.exit_code, 2);
  expect_in("--master_port " + port + " cannot be used: Address already in use (held by process ", result.errors);
}

TEST(HeldPort, IsHeldWhileTheRanksStart) {
  TempFolder folder;
  const std::string script = folder.script("port.py", R"(
import os, socket
port = int(os.environ["MASTER_PORT"])
try:
    socket.socket().bind(("127.0.0.1", port))
    print("taken")
except OSError as error:
    print(error.strerror)
socket.create_server(("", port))
print("listening")
)");
  const LaunchResult result = launch({"--num_ranks", "1", script});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  expect_in("Address already in use\n", result.output);
  expect_in("listening\n", result.output);
}

}  // namespace
}  // namespace deeptide::launch
