// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts, watches and ends the processes of one host together, and leaves no process behind.
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

/// Processes that end together (see Ending), each in its own process group.
/// The owner blocks SIGCHLD and calls reap() when it arrives (see SignalFile).
class ProcessGroup {
 public:
  struct Member {
    int id;                             // the rank, or the index of a program that is not a rank
    std::optional<FlightFiles> flight;  // ranks only
    Process process;
    bool starts_ranks;
    bool ended_by_us = false;  // it ended after this group had asked it to

    /// A rank's coordinates; see place_in().
    std::string place() const { return flight ? place_in(flight->mesh(), id) : ""; }
  };
  struct Events {
    std::function<void(const Member&, Stream, std::string_view)> output;  // empty: end of the stream
    std::function<void(const Member&)> exited;
  };
  explicit ProcessGroup(Events events);

  /// Starts a rank, with the files through which it can be watched. Errors: as Process.
  void start(const RankPlan& plan, const Terminal& terminal);
  /// Starts a program that is not a rank.
  void start_program(int id, const Command& command, const Terminal& terminal);

  /// Adds the members' output and the next deadline.
  void add_to(PollSet& set, bool with_output);
  /// Asks the members to end, or kills them, if that is due.
  void check_deadline();
  void reap();

  void stop(int signal, double grace_s);
  /// Does as stop, after kLastWords, so that ranks that fail for the same reason can report it.
  void stop_soon(int signal, double grace_s);
  void kill();
  void suspend();  // SIGSTOP to all
  void resume();
  /// Sends a signal of the user, such as SIGUSR1, to the ranks alone, not to processes that they started.
  void pass_on(int signal) const;

  bool asked_to_end() const { return ending_.asked(); }
  bool killing() const { return ending_.phase() == Ending::Phase::killing; }
  bool all_ended() const;
  const std::vector<std::unique_ptr<Member>>& members() const { return members_; }

  /// Call when all have ended: ends the processes left in their groups, then delivers the last output.
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
