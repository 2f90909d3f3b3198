// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One end of a connection between launcher and rank: frames, once both ends have proved that they know the job's token.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "launch/system/poll_set.h"
#include "launch/system/sink.h"
#include "launch/wire/frame.h"

namespace deeptide::launch {

/// Both ends send a nonce, and answer the other's with an HMAC under the token over both nonces and their own role.
/// Cuts off an end that gives no proof within five seconds, or sends something that is no frame.
class TokenLink {
 public:
  enum class End : uint8_t { launcher, rank };

  /// Takes the connected socket over. `on_frame`: may throw, which cuts the link.
  TokenLink(int socket, End end, std::string token, std::function<void(const Frame&)> on_frame);
  ~TokenLink();
  TokenLink(const TokenLink&) = delete;
  TokenLink& operator=(const TokenLink&) = delete;

  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();
  /// Cuts the link if the other end does not read.
  void send(FrameKind kind, std::string payload);

  bool proved() const { return proved_; }  // the other end; our own proof may still be under way
  bool closed() const { return socket_ < 0; }

 private:
  void serve();
  void read();
  void prove();
  std::string proof_of(End end, const std::string& own_nonce, const std::string& other_nonce) const;
  void close();

  int socket_;
  End end_;
  std::string token_;
  std::function<void(const Frame&)> on_frame_;
  std::string nonce_;
  std::string said_;  // the other end's nonce and proof, as far as received
  bool answered_ = false;
  bool proved_ = false;
  Clock::time_point deadline_;  // of the proof
  Sink sink_;
  FrameReader reader_;
};

}  // namespace deeptide::launch
