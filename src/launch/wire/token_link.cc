// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a challenge and response in both directions at once, then exchanges frames of bounded size.
#include "launch/wire/token_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "base/sha256.h"

namespace deeptide::launch {
namespace {

constexpr size_t kNonceDigits = 64;
constexpr size_t kProofDigits = 64;
constexpr size_t kLongestFrame = 4ull << 20;  // the stacks of one rank
constexpr std::chrono::seconds kProofLimit{5};
constexpr unsigned kUnheard_ms = 10'000;  // a host that acknowledges nothing for this long is gone

}  // namespace

TokenLink::TokenLink(int socket, End end, std::string token, std::function<void(const Frame&)> on_frame)
    : socket_(socket),
      end_(end),
      token_(std::move(token)),
      on_frame_(std::move(on_frame)),
      nonce_(random_hex(kNonceDigits / 2)),
      deadline_(Clock::now() + kProofLimit),
      sink_(socket),
      reader_(false, kLongestFrame) {
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnheard_ms, sizeof kUnheard_ms);
  sink_.push(nonce_);
}

TokenLink::~TokenLink() { close(); }

void TokenLink::add_to(PollSet& set) {
  if (closed()) return;
  set.add(socket_, static_cast<short>(sink_.empty() ? POLLIN : POLLIN | POLLOUT), [this] { serve(); });
  if (!proved_) set.wake_by(deadline_);
}

void TokenLink::check() {
  if (!proved_ && Clock::now() >= deadline_) close();
}

void TokenLink::send(FrameKind kind, std::string payload) {
  if (closed()) return;
  if (sink_.full()) return close();
  sink_.push(encode({kind, -1, std::move(payload)}));
}

void TokenLink::serve() {
  sink_.write_some();
  if (sink_.closed()) return close();
  try {
    read();
  } catch (const std::exception&) {  // an invalid frame: no later byte can be trusted
    close();
  }
}

void TokenLink::read() {
  char buffer[64 * 1024];
  const size_t room = proved_ ? sizeof buffer : kNonceDigits + kProofDigits - said_.size();
  const ssize_t got = recv(socket_, buffer, room, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return close();
  if (!proved_) {
    said_.append(buffer, static_cast<size_t>(got));
    return prove();
  }
  reader_.feed({buffer, static_cast<size_t>(got)});
  while (!closed()) {
    const auto frame = reader_.next();
    if (!frame) return;
    on_frame_(*frame);
  }
}

void TokenLink::prove() {
  if (said_.size() < kNonceDigits) return;
  const std::string other_nonce = said_.substr(0, kNonceDigits);
  if (!answered_) sink_.push(proof_of(end_, nonce_, other_nonce));
  answered_ = true;
  if (said_.size() < kNonceDigits + kProofDigits) return;
  const End other = end_ == End::launcher ? End::rank : End::launcher;
  proved_ = equal_in_constant_time(said_.substr(kNonceDigits), proof_of(other, other_nonce, nonce_));
  if (!proved_) close();
}

// The role prevents an attacker from returning this end's own proof.
std::string TokenLink::proof_of(End end, const std::string& own_nonce, const std::string& other_nonce) const {
  const std::string role = end == End::launcher ? "launcher" : "rank";
  return hmac_sha256_hex(token_, "deeptide hang link, " + role + ": " + own_nonce + other_nonce);
}

void TokenLink::close() {
  if (!closed()) ::close(socket_);
  socket_ = -1;
}

}  // namespace deeptide::launch
