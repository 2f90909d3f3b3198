// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Defines the payloads of frames, one struct per kind (see frame.h).
#pragma once

#include <string>
#include <vector>

#include "launch/plan/rank_options.h"
#include "launch/plan/rank_plan.h"
#include "launch/process/ending.h"
#include "launch/process/process.h"
#include "launch/system/message.h"

namespace deeptide::launch {

/// Asks for a port for the rendezvous.
struct PortRequest {
  int port = 0;
  bool fixed = false;  // true: this port or an error; false: this port or the next free one
};

struct PortAnswer {
  int port = 0;
};

/// An agent's first message.
struct AgentHello {
  std::string version;
  std::vector<std::string> addresses;  // of the agent's host; the first one is preferred
};

/// The ranks that an agent starts.
struct AgentJob {
  RankOptions options;
  HostPlace place;
  std::string folder;  // where the ranks run
};

/// The end of a rank.
struct RankExit {
  ExitStatus status;
  bool asked = false;  // the rank ended after it had been asked to
  std::string place;   // its coordinates; see place_in()
};

/// Reports that a rank has waited for a collective for --hang_timeout.
struct Late {
  double waited_s = 0.0;  // 0: the wait is over
};

/// The first message of a `deeptide rank`.
struct RankHello {
  std::string version;
  int rank = 0;
  int world_size = 1;
  int node_rank = 0;
  std::string host;  // the host's own name
};

template <>
std::string encode(const PortRequest& message);
template <>
PortRequest decode(const std::string& bytes);
template <>
std::string encode(const PortAnswer& message);
template <>
PortAnswer decode(const std::string& bytes);
template <>
std::string encode(const AgentHello& message);
template <>
AgentHello decode(const std::string& bytes);
template <>
std::string encode(const AgentJob& message);
template <>
AgentJob decode(const std::string& bytes);
template <>
std::string encode(const RankExit& message);
template <>
RankExit decode(const std::string& bytes);
template <>
std::string encode(const Late& message);
template <>
Late decode(const std::string& bytes);
template <>
std::string encode(const RankHello& message);
template <>
RankHello decode(const std::string& bytes);
template <>
std::string encode(const Ending::Request& message);
template <>
Ending::Request decode(const std::string& bytes);

}  // namespace deeptide::launch
