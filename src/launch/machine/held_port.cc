// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds a port and the name that goes with it; finds who listens at a busy one in /proc.
#include "launch/machine/held_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

namespace fs = std::filesystem;

constexpr int kTried = 100;

// Returns a socket that is bound to the address, or -1 and errno. SO_REUSEADDR means nothing to other families than
// TCP's.
template <typename Address>
int bind_socket(int type, const Address& address, size_t size) {
  const int bound = socket(reinterpret_cast<const sockaddr&>(address).sa_family, type | SOCK_CLOEXEC, 0);
  if (bound < 0) return -1;
  const int reuse = 1;
  setsockopt(bound, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  if (bind(bound, reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(size)) == 0) return bound;
  const int error = errno;
  close(bound);
  errno = error;
  return -1;
}

// Binds as the rendezvous does: on every interface, and even if connections in TIME_WAIT hold the port (0: any free
// one).
int bind_port(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return bind_socket(SOCK_STREAM, address, sizeof(address));
}

int port_of(int bound) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  getsockname(bound, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin_port);
}

// Takes a name in the abstract namespace, which is the network's, as ports are.
int bind_name(int port) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "deeptide-port-%d", port);
  return bind_socket(SOCK_DGRAM, address, offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

// Reads the kernel's tables: local address and port are hexadecimal, state 0A is listening, word ten is the inode.
std::string listening_inode(int port) {
  char wanted[8];
  std::snprintf(wanted, sizeof(wanted), ":%04X", port);
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream stream(table);
    std::string line;
    std::getline(stream, line);
    while (std::getline(stream, line)) {
      std::istringstream text(line);
      const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
      if (words.size() > 9 && words[1].ends_with(wanted) && words[3] == "0A") return words[9];
    }
  }
  return {};
}

// Returns " (held by process 123, 'name')" for the listener at `port`, or an empty text if it is not visible.
std::string port_holder(int port) {
  const std::string inode = listening_inode(port);
  if (inode.empty()) return {};
  const std::string wanted = "socket:[" + inode + "]";
  std::error_code error;
  for (const auto& process : fs::directory_iterator("/proc", error)) {
    const std::string pid = process.path().filename();
    if (pid[0] < '0' || pid[0] > '9') continue;
    for (const auto& fd : fs::directory_iterator(process.path() / "fd", error)) {
      if (fs::read_symlink(fd.path(), error) != wanted) continue;
      std::string name;
      std::getline(std::ifstream(process.path() / "comm"), name);
      return " (held by process " + pid + ", '" + name + "')";
    }
  }
  return {};
}

}  // namespace

HeldPort::~HeldPort() {
  if (name_ >= 0) close(name_);
  if (socket_ >= 0) close(socket_);
}

HeldPort& HeldPort::operator=(HeldPort&& other) noexcept {
  HeldPort taken(std::move(other));
  std::swap(number_, taken.number_);
  std::swap(socket_, taken.socket_);
  std::swap(name_, taken.name_);
  return *this;
}

/// `alone`: not where another launcher holds the port for a job of its own. Returns 0 or the error number.
int HeldPort::hold(int wanted, bool alone) {
  HeldPort held;
  held.socket_ = bind_port(wanted);
  if (held.socket_ < 0) return errno;
  held.number_ = port_of(held.socket_);
  held.name_ = bind_name(held.number_);
  if (alone && held.name_ < 0) return errno;
  *this = std::move(held);
  return 0;
}

HeldPort HeldPort::choose(int wanted) {
  HeldPort held;
  const int error = held.hold(wanted, /*alone=*/false);
  if (error == 0) return held;
  throw UsageError("--master_port " + std::to_string(wanted) + " cannot be used: " + std::strerror(error) +
                   port_holder(wanted) + "; choose another port, or omit the option to use a free one");
}

HeldPort HeldPort::first_free(int first) {
  HeldPort held;
  for (int port = first; port < std::min(first + kTried, 65536); ++port) {
    if (held.hold(port, /*alone=*/true) == 0) return held;
  }
  return choose(0);
}

}  // namespace deeptide::launch
