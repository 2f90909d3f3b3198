// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Opens one socket for both address families, or for IPv4 alone if the kernel has no IPv6.
#include "launch/machine/listener.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace deeptide::launch {
namespace {

constexpr int kBacklog = 1024;  // all ranks of a large job connect at once

// Returns the port; 0 if listening fails.
int listen_at(int listener, const sockaddr* any, socklen_t length) {
  sockaddr_in6 bound{};  // both families have the port in one place
  socklen_t bound_length = sizeof bound;
  if (listener < 0 || bind(listener, any, length) != 0 || listen(listener, kBacklog) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &bound_length) != 0) {
    return 0;
  }
  return ntohs(bound.sin6_port);
}

}  // namespace

int open_listener(int& port) {
  const int off = 0;
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  port = listen_at(listener, reinterpret_cast<const sockaddr*>(&any6), sizeof any6);
  if (port != 0) return listener;
  if (listener >= 0) close(listener);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  port = listen_at(listener, reinterpret_cast<const sockaddr*>(&any), sizeof any);
  if (port != 0) return listener;
  const int error = errno;
  if (listener >= 0) close(listener);
  throw std::system_error(error, std::generic_category(), "cannot open a port for this job's processes on other hosts");
}

}  // namespace deeptide::launch
