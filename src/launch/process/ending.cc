// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps one deadline per phase.
#include "launch/process/ending.h"

namespace deeptide::launch {

void Ending::warn(Time now, const Request& request) {
  if (phase_ != Phase::running) return;
  phase_ = Phase::warned;
  request_ = request;
  deadline_ = now + kLastWords;
}

bool Ending::stop(Time now, const Request& request) {
  if (phase_ == Phase::killing) return false;
  phase_ = Phase::stopping;
  request_ = request;
  const auto grace = std::chrono::duration<double>(request.grace_s);
  deadline_ = now + std::chrono::duration_cast<Clock::duration>(grace) + limits_.slack;
  return true;
}

void Ending::kill(Time now) {
  phase_ = Phase::killing;
  deadline_.reset();
  if (limits_.kill) deadline_ = now + *limits_.kill;
}

Ending::Due Ending::check(Time now) {
  if (!deadline_ || now < *deadline_) return Due::nothing;
  switch (phase_) {
    case Phase::running:
      return Due::nothing;
    case Phase::warned:
      stop(now, request_);
      return Due::stop;
    case Phase::stopping:
      kill(now);
      return Due::kill;
    case Phase::killing:
      return Due::give_up;
  }
  return Due::nothing;
}

}  // namespace deeptide::launch
