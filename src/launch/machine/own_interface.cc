// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds the network interface towards a peer in the routing table.
#include "launch/machine/own_interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "launch/machine/machine.h"

namespace deeptide::launch {
namespace {

std::string text_of(const sockaddr* address) {
  char text[NI_MAXHOST] = "";
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return text;
}

// Sends no packet: connecting a datagram socket only looks up the route.
std::string source_address(const addrinfo& peer) {
  const int socket = ::socket(peer.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  const bool known = connect(socket, peer.ai_addr, peer.ai_addrlen) == 0 &&
                     getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) == 0;
  close(socket);
  return known ? text_of(reinterpret_cast<const sockaddr*>(&own)) : "";
}

addrinfo* resolve(const std::string& name) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  return getaddrinfo(name.c_str(), "1", &hints, &found) == 0 ? found : nullptr;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

}  // namespace

bool own_name_is_local() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  addrinfo* found = resolve(name);
  if (!found) return true;
  const std::string first = text_of(found->ai_addr);
  freeaddrinfo(found);
  return is_loopback(first);
}

std::string interface_towards(const std::string& address) {
  addrinfo* peer = resolve(address);
  if (!peer) return {};
  std::string own = source_address(*peer);
  freeaddrinfo(peer);
  if (is_loopback(own)) {  // the peer is this machine, by its own name
    const auto addresses = own_addresses();
    if (!addresses.empty()) own = addresses.front();
  }
  ifaddrs* list = nullptr;
  if (own.empty() || getifaddrs(&list) != 0) return {};
  std::string name;
  for (const ifaddrs* entry = list; entry && name.empty(); entry = entry->ifa_next) {
    const int family = entry->ifa_addr ? entry->ifa_addr->sa_family : AF_UNSPEC;
    if ((family == AF_INET || family == AF_INET6) && text_of(entry->ifa_addr) == own) name = entry->ifa_name;
  }
  freeifaddrs(list);
  return name;
}

}  // namespace deeptide::launch
