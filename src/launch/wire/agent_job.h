// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an agent is told to start, as it travels: the payload of the frame `start`.
#pragma once

#include <string>

#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/process/rank_process.h"

namespace deeptide::launch {

struct AgentJob {
  RankOptions options;
  HostPlace place;
  std::string folder;  // where the ranks run
  double failure_grace_s = 5.0;
  double heartbeat_timeout_s = 5.0;
  double hang_timeout_s = 300.0;
};

/// As bytes, and back. Errors of from_text: std::exception.
std::string to_text(const AgentJob& job);
AgentJob job_from_text(const std::string& text);

/// The end of a rank, the payload of the frame `exited`.
struct RankExit {
  ExitStatus status;
  bool asked = false;  // it ended after it had been asked to
};
std::string to_text(const RankExit& exit);
RankExit exit_from_text(const std::string& text);

}  // namespace deeptide::launch
