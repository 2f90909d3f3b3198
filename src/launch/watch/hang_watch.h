// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Watches a job over all its hosts: reports a hang once, and answers `deeptide ps`, `stacks`, `top` and `trace`.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/plan/options.h"
#include "launch/watch/job_socket.h"
#include "launch/watch/state_exchange.h"

namespace deeptide::launch {

/// Causes no traffic while no rank is late: all hosts are queried only after a host has announced a long wait. The
/// report names a host that does not answer in time, and does not wait for it any longer.
class HangWatch {
 public:
  struct Host {
    std::string name;  // empty: this machine
    int first_rank = 0;
    int num_ranks = 0;
    std::function<void(const StateQuestion&)> ask;  // answered through on_answer
  };

  /// `say` receives the reports; `job`: the process that `deeptide ps` names.
  HangWatch(const Options& options, pid_t job, std::function<void(const std::string&)> say);

  /// Replaces the watched hosts; the methods below identify a host by its index in this list and ignore other numbers.
  /// The targets of `ask` must outlive the list. If `world_size` exceeds the ranks of these hosts (each host or
  /// rank has its own launcher), the reports make no statement about all ranks.
  void watch(std::vector<Host> hosts, int world_size);
  /// Adds a host, also during a round; returns its index. It takes the place of one that is over and had the same
  /// first rank: a rank whose link broke has come back.
  size_t add(Host host);
  /// Records the host's longest wait once it has reached the timeout; 0 once that wait is over.
  void on_late(size_t host, double waited_s);
  void on_answer(size_t host, const std::string& answer);
  /// Records that all ranks of the host have ended, or that the host was lost.
  void on_over(size_t host);

  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();

 private:
  enum class Purpose : uint8_t { hang, stacks, ps, top, trace };

  /// A query of all hosts: first where their ranks are, then the stacks of some.
  struct Round {
    Purpose purpose;
    std::optional<Caller> caller;
    StateQuestion wish;  // what the ranks are asked beside their places
    uint64_t id = 0;
    bool asked_stacks = false;
    std::set<size_t> pending;  // hosts that have not answered
    std::set<size_t> silent;   // hosts that did not answer in time
    Clock::time_point deadline;
    std::vector<RankState> states;
  };

  struct Watched {
    Host host;
    double late_s = 0.0;
    bool over = false;
  };

  void serve(const std::string& question, Caller caller);
  void begin(Purpose purpose, std::optional<Caller> caller, StateQuestion wish = {});
  void ask(Round& round, size_t host, const std::vector<int>& stacks_of);
  bool advance(Round& round);
  bool ask_stacks(Round& round);
  void close(Round& round);
  std::string ranks_by_host(const std::string& what, const std::function<bool(size_t host)>& chosen) const;
  std::string report_of(const Round& round) const;
  std::string ps_line(const Round& round) const;
  std::string top_text(const Round& round) const;

  double timeout_s_;
  pid_t job_;
  std::string command_;
  std::function<void(const std::string&)> say_;
  JobSocket socket_;
  std::vector<Watched> hosts_;
  size_t world_size_ = 0;
  std::list<Round> rounds_;
  uint64_t last_id_ = 0;
  Clock::time_point started_ = Clock::now();
  bool grows_ = false;     // hosts are added one by one; some may never arrive
  bool due_ = false;       // a host has become late
  bool reported_ = false;  // reset when no host is late
};

}  // namespace deeptide::launch
