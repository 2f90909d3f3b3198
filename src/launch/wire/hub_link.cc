// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Connects without blocking, because the job does not depend on the link.
#include "launch/wire/hub_link.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <sstream>

namespace deeptide::launch {
namespace {

constexpr std::chrono::seconds kHubConnectLimit{3};
constexpr std::chrono::seconds kFirstPause{1};
constexpr std::chrono::seconds kLongestPause{30};

}  // namespace

HubLink::HubLink(const std::string& at, std::string token, std::string hello, Events events)
    : token_(std::move(token)), hello_(std::move(hello)), events_(std::move(events)), pause_(kFirstPause) {
  std::istringstream parts(at);
  std::getline(parts, port_, ',');
  for (std::string address; std::getline(parts, address, ',');) addresses_.push_back(address);
  try_next();
}

HubLink::~HubLink() { give_up_socket(); }

void HubLink::try_next() {
  give_up_socket();
  while (connecting_ < 0 && next_ < addresses_.size()) start_connecting(addresses_[next_++]);
  if (connecting_ < 0) return pause();
  deadline_ = Clock::now() + kHubConnectLimit;
}

void HubLink::start_connecting(const std::string& address) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // avoids name servers
  if (getaddrinfo(address.c_str(), port_.c_str(), &hints, &found) != 0) return;
  connecting_ = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool failed =
      connecting_ < 0 || (connect(connecting_, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS);
  freeaddrinfo(found);
  if (failed) give_up_socket();
}

void HubLink::pause() {
  next_ = 0;
  deadline_ = Clock::now() + pause_;
  pause_ = std::min<Clock::duration>(2 * pause_, kLongestPause);
}

void HubLink::give_up_socket() {
  if (connecting_ >= 0) ::close(connecting_);
  connecting_ = -1;
}

void HubLink::add_to(PollSet& set) {
  if (link_) link_->add_to(set);
  if (connecting_ >= 0) set.add(connecting_, POLLOUT, [this] { on_connected(); });
  if (!link_) set.wake_by(deadline_);
}

void HubLink::on_connected() {
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(connecting_, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return try_next();
  link_ = std::make_unique<TokenLink>(connecting_, TokenLink::End::rank, token_, [this](const Frame& frame) {
    if (frame.kind == FrameKind::ask) events_.asked(decode<StateQuestion>(frame.payload));
  });
  connecting_ = -1;
}

void HubLink::check() {
  if (!link_) {
    if (Clock::now() >= deadline_) try_next();
    return;
  }
  link_->check();
  if (!up_ && link_->proved() && !link_->closed()) {
    up_ = true;
    up_since_ = Clock::now();
    link_->send(FrameKind::hello, hello_);
    events_.changed();
  }
  if (link_->closed()) on_closed();
}

void HubLink::on_closed() {
  link_.reset();
  if (!up_) return try_next();
  up_ = false;
  // A launcher that refuses this rank closes the link at once, and is not to be asked every second.
  if (Clock::now() - up_since_ > kLongestPause) pause_ = kFirstPause;
  pause();
  events_.changed();
}

void HubLink::send(FrameKind kind, std::string payload) {
  if (up_) link_->send(kind, std::move(payload));
}

}  // namespace deeptide::launch
