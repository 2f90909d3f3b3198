// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges reports after a failure: which rank failed, which ranks wait, which never arrived, which raised an error.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/world.h"
#include "world/mesh.h"

namespace deeptide::world {

/// Interval at which a wait checks for reports of other ranks.
inline constexpr std::chrono::milliseconds kPollFailures{250};
/// The default of the config's "error_grace".
inline constexpr std::chrono::milliseconds kErrorGrace{30'000};

/// Lives in the world's store; used only on failure and by long waits. Thread-safe. A forked child tells the others
/// nothing: it is no rank, and the connection is its parent's.
class FailureBoard {
 public:
  /// `grace`: how long a rank may take from an error that it raised to its next call before the others stop waiting.
  /// `mesh`: names ranks by their coordinates; absent: data is the only axis.
  FailureBoard(const World& world, const std::string& prefix, std::chrono::milliseconds grace = kErrorGrace,
               const std::optional<Mesh>& mesh = {});

  /// Reports that this rank cannot continue ("left training", "failed in forward: …"), and what ended it, if that was
  /// noted. Never throws.
  void report_failure(const std::string& text) noexcept;
  /// Reports that this rank ends in good order, unless a cause was noted. Never throws.
  void report_end(const std::string& text) noexcept;
  /// Reports that `event` ("raised ValueError in forward") happened to a rank that may go on; only the first line of
  /// `text`, the error's own, is told. Replaces an earlier error of this rank. A rank that has noted a cause cannot go
  /// on: then it reports a failure. Never throws.
  void report_error(const std::string& event, const std::string& text) noexcept;
  /// Takes the error back: this rank goes on. Costs nothing if there is none. Never throws.
  void withdraw_error() noexcept;
  /// Reports that this rank's step of a pipeline ended in its middle ("raised ValueError in train_batch: …"): others
  /// wait for what it will not send, whatever it does next. Until it is withdrawn. Never throws.
  void report_lost_step(const std::string& why) noexcept;
  void withdraw_lost_step() noexcept;
  /// Such a report of one of these ranks, once it has stood for the grace.
  std::optional<std::string> lost_step(const std::vector<int>& ranks) noexcept;
  /// At the end of the process that serves the store: waits until the others have ended as well, at most so long, for
  /// they read there why. Never throws.
  void wait_for_ends(std::chrono::milliseconds limit) noexcept;
  /// Notes what ends this rank: a rank that looks later finds its report alone. The first cause stays.
  void note_cause(const std::string& cause) noexcept;
  /// Returns another rank's report, e.g. "rank 1 left training at step 3"; empty while there is none. If that rank
  /// ended because others gave no report, names those that have given none by now. Of errors, the earliest that has
  /// stood for the grace since this board first saw it. A rank that waits gives its own place, which it records if
  /// another one asks for it.
  std::optional<std::string> failure(const std::string& own_place = "") noexcept;
  /// The `failure` that one meets who waits for these ranks: not another's end in good order.
  std::optional<std::string> failure_among(const std::vector<int>& ranks, const std::string& own_place) noexcept;
  /// Whether a rank reported more than its end in good order: what this rank waits for will not come.
  bool is_failure() noexcept;
  /// Returns the earliest error of another rank that it has not taken back, however fresh.
  std::optional<std::string> error() noexcept;
  /// Whether a rank has reported its end, for whatever reason. Errors: the store's.
  bool has_ended(int rank);
  ~FailureBoard();
  FailureBoard(const FailureBoard&) = delete;

  /// Names the engine whose board this is by its number among this rank's, and by the type of its model.
  void name_engine(const std::string& model);
  /// "engine 2 (Discriminator), "; empty while this rank has no other engine.
  std::string engine() const;
  /// A rank as reports name it: Mesh::name.
  std::string name(int rank) const { return mesh_.name(rank); }
  /// Whether the store answers.
  bool is_reachable() noexcept;
  /// Records the place where this rank timed out or lost a peer and asks for the others' places; returns the cause, if
  /// this rank or another knows it, else those that came and the missing ranks. Takes half a second, in which it asks
  /// `find_cause`, if any, for what this rank finds out: connections break a moment before their process counts as
  /// ended.
  using FindCause = std::function<std::optional<std::string>()>;
  /// `find_process`: of a rank on this machine, if it is alive.
  using FindProcess = std::function<std::optional<int>(int rank)>;
  std::string diagnose(const std::string& own_place, const FindCause& find_cause = {},
                       const FindProcess& find_process = {}) noexcept;

 private:
  void report(const std::string& text, bool in_good_order);
  /// Whether there is somebody to tell, and this is the process to do so.
  bool has_listeners() const;
  std::string key(const std::string& kind, int64_t number) const;
  std::optional<std::string> earliest_error(std::chrono::milliseconds grace);
  struct Reports {
    std::string places;   // "; rank 0: waits: …" for each rank that gave its own
    std::string missing;  // the others: "1, 2"
  };
  Reports read_reports(const FindProcess& find_process = {});
  void answer_other_engines(const std::string& own_place);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int rank_;
  int size_;
  Mesh mesh_;
  std::chrono::milliseconds grace_;
  const pid_t process_;
  std::mutex mutex_;
  std::string engine_;
  c10::intrusive_ptr<c10d::Store> common_;  // of all engines, below the prefixes of their stores
  std::string cause_;
  bool unexplained_ = false;  // the cause is that ranks gave no report

  std::string error_;                    // this rank's own, in force
  int64_t error_number_ = 0;             // among the errors of all ranks, from 1
  std::atomic<bool> has_error_ = false;  // guards the two above from being looked at for nothing
  std::atomic<bool> has_lost_step_ = false;
  std::map<int, std::chrono::steady_clock::time_point> lost_seen_;       // by rank: when its report was first seen here
  int64_t first_open_ = 1;                                               // errors below it have been taken back
  std::map<int64_t, std::chrono::steady_clock::time_point> first_seen_;  // of the others' errors in force
};

}  // namespace deeptide::world
