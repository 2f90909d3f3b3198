// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Accepts links at a listener and serves them.
#include "launch/wire/rank_hub.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "launch/machine/listener.h"
#include "launch/machine/machine.h"

namespace deeptide::launch {

namespace {

constexpr size_t kMaxStrangers = 256;  // peers without a proof; further ones wait in the kernel
constexpr size_t kReserve = 64;        // descriptors
constexpr std::chrono::seconds kDoorPause{1};

/// Returns the possible number of links, `wanted` if possible. Raises the limit only after mpirun has started, which
/// therefore does not inherit it.
size_t room_for(size_t wanted) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = std::max(before, std::min<rlim_t>(wanted + kReserve, limit.rlim_max));
  if (limit.rlim_cur != before && setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  return limit.rlim_cur > kReserve ? limit.rlim_cur - kReserve : 1;
}

}  // namespace

RankHub::RankHub(std::vector<Host> hosts) : hosts_(std::move(hosts)), max_guests_(room_for(0)) {
  int port = 0;
  try {
    listener_ = open_listener(port);
  } catch (const std::system_error&) {
    return;
  }
  std::vector<std::string> addresses = own_addresses();
  if (addresses.empty()) addresses.push_back("127.0.0.1");
  address_ = std::to_string(port);
  for (const std::string& address : addresses) address_ += "," + address;
}

RankHub::~RankHub() {
  if (listener_ >= 0) ::close(listener_);
}

void RankHub::serve(const std::string& token, HangWatch& watch) {
  token_ = token;
  watch_ = &watch;
}

void RankHub::add_to(PollSet& set) {
  const auto strangers = std::count_if(guests_.begin(), guests_.end(), [](auto& g) { return !g->link->proved(); });
  const bool paused = Clock::now() < closed_until_;
  if (paused) set.wake_by(closed_until_);
  if (listener_ >= 0 && !paused && guests_.size() < max_guests_ && static_cast<size_t>(strangers) < kMaxStrangers) {
    set.add(listener_, POLLIN, [this] { accept_one(); });
  }
  for (const auto& guest : guests_) guest->link->add_to(set);
}

void RankHub::accept_one() {
  const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0) {
    const bool again = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;  // the peer has disconnected
    if (!again) closed_until_ = Clock::now() + kDoorPause;
    return;
  }
  Guest* guest = guests_.emplace_back(std::make_unique<Guest>()).get();
  guest->link = std::make_unique<TokenLink>(socket, TokenLink::End::launcher, token_,
                                            [this, guest](const Frame& frame) { on_frame(*guest, frame); });
}

void RankHub::check() {
  for (const auto& guest : guests_) {
    guest->link->check();
    if (guest->link->closed()) take_leave(*guest);
  }
  std::erase_if(guests_, [](const auto& guest) { return guest->link->closed(); });
}

void RankHub::on_frame(Guest& guest, const Frame& frame) {
  if (frame.kind == FrameKind::hello) return on_hello(guest, decode<RankHello>(frame.payload));
  if (!guest.number) throw std::runtime_error("no hello first");
  if (frame.kind == FrameKind::late) {
    watch_->on_late(*guest.number, decode<Late>(frame.payload).waited_s);
  } else if (frame.kind == FrameKind::states) {
    watch_->on_answer(*guest.number, frame.payload);
  }
}

void RankHub::on_hello(Guest& guest, const RankHello& hello) {
  const bool first = world_size_ == 0;
  if (guest.number || hello.version != DEEPTIDE_VERSION || hello.rank < 0 || hello.rank >= hello.world_size ||
      (!first && hello.world_size != world_size_)) {
    throw std::runtime_error("not a rank of this job, or not of this version");
  }
  world_size_ = hello.world_size;
  if (first) watch_->watch({}, world_size_);
  if (first) max_guests_ = room_for(hello.world_size + kMaxStrangers);
  // A rank that comes back may do so before its broken link is noticed here.
  for (const auto& other : guests_) {
    if (other->rank == hello.rank) take_leave(*other);
  }
  guest.rank = hello.rank;
  TokenLink* link = guest.link.get();
  guest.number = watch_->add({name_of(hello), hello.rank, 1,
                              [link](const StateQuestion& question) { link->send(FrameKind::ask, encode(question)); }});
}

void RankHub::take_leave(Guest& guest) {
  if (guest.number) watch_->on_over(*guest.number);
  guest.number.reset();
  guest.rank = -1;
  guest.link->close();
}

// The hostfile may name a host by an address or an alias. The index then identifies the host, because starters fill
// hosts in the hostfile's order.
std::string RankHub::name_of(const RankHello& hello) const {
  const std::string brief = hello.host.substr(0, hello.host.find('.'));
  for (const Host& host : hosts_) {
    if (host.name == hello.host || host.name == brief) return host.name;
  }
  const auto place = static_cast<size_t>(hello.node_rank);
  return place < hosts_.size() ? hosts_[place].name : hello.host;
}

}  // namespace deeptide::launch
