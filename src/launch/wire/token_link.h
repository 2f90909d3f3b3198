// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Implements one end of a connection between launcher and rank, whose ends first prove that they know the job's token.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "launch/system/poll_set.h"
#include "launch/system/sink.h"
#include "launch/wire/frame.h"

namespace deeptide::launch {

/// Each end sends a nonce and answers the other's with an HMAC under the token over both nonces and its own role. Cuts
/// off a peer that gives no proof within five seconds or sends an invalid frame.
class TokenLink {
 public:
  enum class End : uint8_t { launcher, rank };

  /// Takes ownership of the connected socket. `on_frame` may throw, which cuts the link.
  TokenLink(int socket, End end, std::string token, std::function<void(const Frame&)> on_frame);
  ~TokenLink();
  TokenLink(const TokenLink&) = delete;
  TokenLink& operator=(const TokenLink&) = delete;

  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();
  /// Cuts the link if the other end does not read.
  void send(FrameKind kind, std::string payload);
  void close();

  bool proved() const { return proved_; }  // the other end has; this end's proof may still be in flight
  bool closed() const { return socket_ < 0; }

 private:
  void serve();
  void read();
  void prove();
  std::string proof_of(End end, const std::string& own_nonce, const std::string& other_nonce) const;

  int socket_;
  End end_;
  std::string token_;
  std::function<void(const Frame&)> on_frame_;
  std::string nonce_;
  std::string said_;  // the received part of the other end's nonce and proof
  bool answered_ = false;
  bool proved_ = false;
  Clock::time_point deadline_;  // of the proof
  Sink sink_;
  FrameReader reader_;
};

}  // namespace deeptide::launch
