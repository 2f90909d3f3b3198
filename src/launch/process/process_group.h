// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The processes of one host: started together, watched, and ended together without anything left behind.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "launch/plan/rank_plan.h"
#include "launch/process/ending.h"
#include "launch/process/flight_files.h"
#include "launch/process/memory_kills.h"
#include "launch/process/orphan_guard.h"
#include "launch/process/process.h"
#include "launch/system/poll_set.h"

namespace deeptide::launch {

enum class Stream : uint8_t { output, errors };

/// Processes, each in a process group of its own, that end together (see Ending).
/// The owner blocks SIGCHLD and calls reap() when it arrives (see SignalFile).
class ProcessGroup {
 public:
  struct Member {
    int id;                             // the rank, or the index of a program that is none
    std::optional<FlightFiles> flight;  // of a rank
    Process process;
    bool starts_ranks;
    bool ended_by_us = false;  // it ended after we had asked it to
  };
  struct Events {
    std::function<void(const Member&, Stream, std::string_view)> output;  // empty: the stream's end
    std::function<void(const Member&)> exited;
  };
  explicit ProcessGroup(Events events);

  /// Starts a rank, with the files through which it can be watched. Errors: as Process.
  void start(const RankPlan& plan, const Terminal& terminal);
  /// Starts a program that is no rank.
  void start_program(int id, const Command& command, const Terminal& terminal);

  /// Adds the members' output, and the time of the next deadline.
  void add_to(PollSet& set, bool with_output);
  /// Asks the members to end, or kills them, if that has become due.
  void check_deadline();
  void reap();

  void stop(int signal, double grace_s);
  /// The same after kLastWords: ranks that fail for the same reason get to report it.
  void stop_soon(int signal, double grace_s);
  void kill();
  void suspend();  // SIGSTOP to all
  void resume();
  /// A signal that is the user's own, as SIGUSR1: to the ranks alone, not to what they started.
  void pass_on(int signal) const;

  bool asked_to_end() const { return ending_.asked(); }
  bool killing() const { return ending_.phase() == Ending::Phase::killing; }
  bool all_ended() const;
  const std::vector<std::unique_ptr<Member>>& members() const { return members_; }

  /// After all have ended: ends what they left in their groups, then hands over the last output.
  void finish();

 private:
  void add(int id, std::optional<FlightFiles> flight, const Command& command, const Terminal& terminal);
  void ask_to_end();
  void signal_all(int signal);
  void read(Member& member, Stream stream);
  void close(Member& member, Stream stream);
  void drain(Member& member, Stream stream);
  void kill_adopted();
  bool wait_until_gone(Clock::time_point limit);

  Events events_;
  OrphanGuard guard_;
  MemoryKills memory_kills_;
  std::vector<std::unique_ptr<Member>> members_;
  Ending ending_;
};

}  // namespace deeptide::launch
